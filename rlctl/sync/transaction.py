"""One sync from its announcement to its end. Whatever happens, every replica serves a whole version or is fenced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Literal

from rlctl.errors import RlctlError
from rlctl.sync.deadline import Deadline
from rlctl.sync.engine import CheckpointEngine, TransferStats
from rlctl.sync.errors import CorruptedError, GivenUpError, MemberLostError, PeerLostError, WrongBaseError
from rlctl.sync.fencing import ReplicaRecord
from rlctl.sync.policy import SyncPolicy
from rlctl.sync.protocols import Group
from rlctl.sync.replica_calls import ReplicaCalls
from rlctl.sync.report import SyncError, SyncEvent, SyncReport
from rlctl.sync.state_log import StateLog
from rlctl.sync.states import Ending, State
from rlctl.sync.traits import Delivery
from rlctl.sync.transfer import Request, Result, Transfer, named
from rlctl.sync.waiting import gather

# What is left of the deadline for the way back, after a transfer that used up the rest.
WAY_BACK = 1.0
# A member's failure that may not be its own: worth another attempt.
PASSING = (PeerLostError, CorruptedError, GivenUpError, WrongBaseError)


class Transaction:
    """One sync; ``run`` is called once.

    Args:
        version: that is to be brought.
        base_version: what every replica holds, or None.
        trainers: the senders.
        rollouts: the receivers; each member names the replica it fills.
        records: the replicas that are to get it; members of others are asked nothing.
        calls: shared by all syncs.
        engine: of the members.
        policy: how.
        again: the trainers send what they kept of ``version``.
        on_event: told what happens.
    """

    def __init__(
        self,
        version: int,
        base_version: int | None,
        *,
        trainers: Group,
        rollouts: Group,
        records: Sequence[ReplicaRecord],
        calls: ReplicaCalls,
        engine: type[CheckpointEngine],
        policy: SyncPolicy,
        again: bool,
        on_event: Callable[[SyncEvent], None],
    ) -> None:
        self._version = version
        self._base_version = base_version
        self._trainers = trainers
        self._rollouts = rollouts
        self._records = {record.name: record for record in records}
        self._calls = calls
        self._engine = engine
        self._policy = policy
        self._again = again
        self._deadline = Deadline(policy.timeout)
        self._work = Deadline(policy.timeout - min(WAY_BACK, policy.timeout / 10))
        self._log = StateLog(version, policy.commit, self._errors, on_event)
        self._sent: list[TransferStats] = []
        self._tensors = self._extra_nbytes = 0
        self._attempts = 0
        self._delivery: Delivery = "whole"
        self._cause: RlctlError | None = None
        self._committed: list[str] = []
        self._stall = 0.0

    def run(self) -> SyncReport:
        """Bring the version. Raises SyncError when no replica serves it in the end."""
        for record in self._records.values():
            record.begin()
        try:
            with self._log.state(State.ANNOUNCE):
                pass
            if self._policy.commit == "inplace":
                self._stop_serving()
            self._bring()
            if self._policy.commit == "staged":
                self._stop_serving()
            self._commit()
        except RlctlError as error:
            self._cause = error
        finally:
            self._finalize()
            self._serve_again()
            self._fence()
        return self._report()

    # --- the way there ---

    def _healthy(self) -> list[ReplicaRecord]:
        return [r for r in self._records.values() if not r.error]

    def _stop_serving(self) -> None:
        how, version = self._policy.interruption, self._version
        patience = self._policy.pause_timeout
        deadline = self._work.within(self._policy.timeout / 4 if patience is None else patience)

        def interrupt(record: ReplicaRecord) -> None:
            if not record.fenced:
                record.paused_at = monotonic()
            record.served.interrupt(how, version, deadline)  # one that is fenced may still be at old requests

        with self._log.state(State.INTERRUPT):
            self._calls.on_all(self._healthy(), "interrupt", interrupt, deadline)
        with self._log.state(State.RELEASE_KV):
            self._calls.on_all(self._healthy(), "release_kv", lambda r: r.served.release_kv(deadline), deadline)

    def _places(self) -> list[int]:
        healthy = {r.name for r in self._healthy()}
        return [i for i, m in enumerate(self._rollouts.members) if m.replica in healthy]

    def _bring(self) -> None:
        """Transfer until every replica has it all, or no attempt is left. Raises what stopped it for everybody."""
        due = self._places()
        while due:
            self._attempts += 1
            result = self._attempt(due)
            again = [p for p in due if p not in result.received and self._passing(p, result)]
            if result.trainers and not all(isinstance(e, PASSING) for e in result.trainers.values()):
                again = []
            last = self._attempts >= self._policy.attempts or self._work.over
            lost = [p for p in due if p not in result.received and (last or p not in again)]
            if lost and self._policy.commit == "staged":
                lost = [p for p in due if p not in result.received]
            for place in lost:
                self._fail(place, result)
            due = [] if last else [p for p in again if p not in lost]
            for place in due:
                self._note_loss(place, result.failed.get(place))
            if due:
                self._retry(due, result)
        if self._policy.commit == "staged" and any(r.error for r in self._records.values()):
            raise GivenUpError("a replica did not get its shadow copy, so none is swapped")

    def _attempt(self, places: list[int]) -> Result:
        transfer = Transfer(self._trainers, self._rollouts, places, self._engine, self._work)
        staged = self._policy.commit == "staged"
        command: Literal["receive", "stage"] = "stage" if staged else "receive"
        with self._log.state(State.PREPARE):
            metadata = transfer.prepare()
            base = transfer.base(self._base_version, command, metadata)
        if transfer.result.going:
            with self._log.state(State.CONNECT):
                transfer.connect(metadata)
        if transfer.result.going:
            for place in places:
                self._record(place).touched |= not staged
            with self._log.state(State.TRANSFER):
                request = Request(self._version, base, command, self._policy.cast, self._policy.partial, self._again)
                transfer.move(request)
        result, self._delivery = transfer.result, transfer.result.delivery
        with self._log.state(State.VERIFY):
            self._sent += result.sent
            members = [*result.sent, *(received.stats for received in result.received.values())]
            self._extra_nbytes = max([self._extra_nbytes, *(stats.extra_nbytes for stats in members)])
            self._tensors = max([self._tensors, *(len(r.report.loaded) for r in result.received.values())])
        return result

    def _passing(self, place: int, result: Result) -> bool:
        error = result.failed.get(place)
        stuck = isinstance(error, MemberLostError) and self._policy.commit == "inplace"
        return error is None or (isinstance(error, PASSING) and not stuck)

    def _retry(self, due: list[int], result: Result) -> None:
        self._base_version = None  # whatever went wrong, and wherever they were written to, whole tensors are right
        names = ", ".join(self._rollouts.members[p].name for p in due)
        reasons = [result.reason(place, self._trainers, self._rollouts) for place in due]
        self._log.tell("retry", detail=f"{names}: {'; '.join(dict.fromkeys(reasons))}")
        self._settle_members(committed=None)

    def _fail(self, place: int, result: Result) -> None:
        self._note_loss(place, result.failed.get(place))
        self._record(place).fail(result.reason(place, self._trainers, self._rollouts))

    def _note_loss(self, place: int, error: RlctlError | None) -> None:
        if isinstance(error, MemberLostError) and self._rollouts.members[place].holds_weights:
            self._record(place).touched = True

    def _commit(self) -> None:
        with self._log.state(State.COMMIT):
            places = self._places()
            arguments = {place: {"version": self._version} for place in places}
            answers = gather(self._rollouts.start("commit", arguments, self._deadline), self._deadline, "commit")
            for place in places:
                self._record(place).touched = True
            for place, error in answers.errors.items():
                self._record(place).fail(f"commit: {named(self._rollouts.members[place].name, error)}")
            filled = [self._record(place) for place in places]
            self._committed = list(dict.fromkeys(r.name for r in filled if not r.error))

    # --- the way back ---

    def _finalize(self) -> None:
        whole = bool(self._committed) and len(self._committed) == len(self._records)
        with self._log.state(State.FINALIZE):
            self._settle_members(committed=self._version if whole else None)

    def _settle_members(self, *, committed: int | None) -> None:
        """Have every member end what it is in. One that does not answer is named by the next sync's prepare."""
        deadline = Deadline(min(WAY_BACK / 2, max(self._deadline.remaining, WAY_BACK / 4)))
        futures = {}
        for side, group in enumerate((self._trainers, self._rollouts)):
            places = [p for p, m in enumerate(group.members) if group is self._trainers or m.replica in self._records]
            started = group.start("finalize", {p: {"committed": committed} for p in places}, deadline)
            futures.update({(side, place): future for place, future in started.items()})
        gather(futures, deadline, "finalize")

    def _serve_again(self) -> None:
        deadline = Deadline(max(self._deadline.remaining, WAY_BACK / 2))

        def resume(record: ReplicaRecord) -> None:
            version = self._next_version(record)
            assert version is not None
            record.served.resume(version, deadline)

        idle = [r for r in self._records.values() if r.name in self._committed or r.paused_at is not None]
        with self._log.state(State.RESTORE_KV):
            back = [r for r in idle if self._next_version(r) is not None]
            self._calls.on_all(back, "restore_kv", lambda r: r.served.restore_kv(deadline), deadline)
        with self._log.state(State.RESUME):
            back = [r for r in idle if self._next_version(r) is not None]
            self._calls.on_all(back, "resume", resume, deadline)

    def _next_version(self, record: ReplicaRecord) -> int | None:
        """Return what the replica is to serve from now on; None: nothing."""
        if record.broken:
            return None
        if record.name in self._committed:
            return self._version
        if self._committed or record.touched or record.fenced:
            return None
        return record.version

    def _fence(self) -> None:
        for record in self._records.values():
            version = self._next_version(record)
            if version is not None:
                self._stall = max(self._stall, record.back(version))
                continue
            reason = record.error or record.fenced or (self._cause.message if self._cause else "others have moved on")
            record.fence(reason)
            self._log.tell("fenced", replica=record.name, detail=reason)

    def _report(self) -> SyncReport:
        fenced = {r.name: r.fenced for r in self._records.values() if r.fenced}
        committed = [name for name in self._committed if name not in fenced]
        kept = [name for name in self._records if name not in fenced and name not in committed]
        ending = Ending.FENCED if fenced else Ending.KEPT if kept else Ending.COMMITTED
        report = SyncReport(
            self._version,
            self._tensors,
            sum(stats.bytes_moved for stats in self._sent),
            self._deadline.elapsed,
            self._log.phases,
            ending,
            committed,
            kept,
            fenced,
            self._stall,
            self._extra_nbytes,
            self._attempts,
            self._delivery,
        )
        self._log.tell("ended", seconds=report.seconds, detail=ending)
        if self._log.listener_error is not None:
            raise self._log.listener_error
        if self._records and not committed:
            reasons = list(dict.fromkeys(r.error for r in self._records.values() if r.error))
            if self._cause is not None and not reasons:
                reasons = [self._cause.message]
            raise SyncError(
                f"the sync to version {self._version} failed after {report.seconds:.1f} s: {'; '.join(reasons)}",
                fenced=list(fenced),
                fix="the replicas go on with the version they had" if kept else "the next sync fills them in full",
                report=report,
            )
        return report

    def _errors(self) -> list[str]:
        return [r.error for r in self._records.values() if r.error]

    def _record(self, place: int) -> ReplicaRecord:
        return self._records[self._rollouts.members[place].replica]
