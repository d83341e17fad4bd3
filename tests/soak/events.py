"""What was done to the run and what became of it."""

from dataclasses import dataclass, field

from tests.soak.ledger import Finding


@dataclass
class Event:
    """One fault."""

    fault: str
    target: str
    at_s: float  # since the soak began
    step: int
    moment: str = ""  # what a controller was at when it was killed: see Run.moment
    survived: bool | None = None  # None: the controller has ended as it should, and must come back
    recovered_s: float | None = None
    gone_s: float | None = None  # from the controller's end until nothing was left of its workers
    detail: str = ""

    def lost(self, why: str) -> "Event":
        self.survived, self.detail = False, why
        return self


@dataclass
class Outcome:
    disk: str
    seconds: float = 0.0  # of the soak, without the undisturbed run
    controllers: int = 0
    steps: int = 0  # of the finished run
    steps_trained: int = 0  # those that were rolled back too
    events: list[Event] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def violated(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.is_held]

    @property
    def pending(self) -> list[Event]:
        return [event for event in self.events if event.survived is None]
