"""What can go wrong, as a tree. Each error is one line a person can act on; the CLI turns it into
an exit code and shows no traceback.

    MinirlError            exit 1: the run cannot go on
    ├── RecipeError        exit 2: the user's input is wrong: key, value, rule, remedy
    ├── WorkerDied         exit 1: a process ended that nothing can replace; carries its last words
    ├── StaleWeights       exit 1: the engine does not run the weights it was told to (rule 6)
    └── Stalled            exit 3: nothing moved for too long; stacks are in the run directory

Leaves out: a failed rollout or reward. Those are data: a dropped group with a reason and a count.
"""


class MinirlError(Exception):
    exit_code = 1


class RecipeError(MinirlError):
    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, remedy: str):
        shown = repr(value) if not isinstance(value, str) else f'"{value}"'
        super().__init__(f"{key} = {shown}: {rule}; {remedy}")
        self.key = key


class WorkerDied(MinirlError):
    pass


class StaleWeights(MinirlError):
    pass


class Stalled(MinirlError):
    exit_code = 3
