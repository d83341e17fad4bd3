"""`minirl chaos`: a run that everything happens to, and the proof that nothing was lost.

deck.py       the faults, and the order and moments that a seed deals them in
soak.py       the whole of it: strikes until the time is over, the end, what it comes to
strikes.py    how each fault is done, and when it counts as survived
run.py        the run that is struck: one controller after another in one directory
life.py       one controller process with its workers, and what is left of it
witness.py    follows the run's files while it runs: sees also what is taken back later
files.py      tears lines as a crash would
disk.py       a small disk that can be filled
task.py       the recipe's task, with rewards that raise, hang, exit or take their time
ledger.py     the proof, from the files of the run alone
events.py     what was done and what became of it
accuracy.py   against a run that nothing happened to
report.py     the figures, as JSON and as the table of docs/faults.md

All of it stands outside: the soak runs `minirl train` as anybody would, and knows of it only what
it writes and what the kernel says of its processes.
"""
