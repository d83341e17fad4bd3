"""`python -m tests.soak`: faults on purpose, and the proof that nothing was lost.

__main__.py            the command
schedule.py            the faults, and the order and moments that a seed gives them
soak.py                the whole: inject faults until the time is over, finish, prove
inject.py              how each fault is made, and when it counts as survived
run.py                 the run: one controller after another in one directory
controller_process.py  one controller process with its workers, and what is left of it
follower.py            follows the run's logs while it runs: also what is rolled back later
run_files.py           the run's files: the only place that knows their names and form
disk.py                a small disk that can be filled
task.py                the recipe's task, with rewards that raise, hang, exit or are slow
ledger.py              the proof, from the files of the run alone
events.py              the faults that were injected and what became of them
accuracy.py            against a run without faults
report.py              the figures, as JSON and as the tables of docs/faults.md

The soak stands outside: it runs `minirl train` like any user, and knows of a run only what the run
writes and what the kernel says of its processes.
"""
