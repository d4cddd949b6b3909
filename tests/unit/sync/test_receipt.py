import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from zerodrift.core.completion import Completion, FinishReason, LogprobKind
from zerodrift.core.errors import (
    InvalidPrompt,
    InvalidValue,
    NoReceipt,
    RecordError,
    SchemaMismatch,
    UnsafePath,
)
from zerodrift.core.request import SamplingParams
from zerodrift.core.version import AdapterVersion, LineagePass, LineageSegment, VersionSpan, WeightVersion
from zerodrift.engine.output import Output
from zerodrift.sync.canary import Canary, canary_of, random_canary
from zerodrift.sync.judge import Arrival
from zerodrift.sync.key import create_key, read_key
from zerodrift.sync.ledger import LOG, MOST_LINE_BYTES, ReceiptLedger, require_receipt
from zerodrift.sync.receipt import (
    SCHEMA,
    Receipt,
    ReceiptedRollout,
    SealedReceipt,
    decode_receipt,
    opened,
    seal,
)
from zerodrift.weights.registry import Registry

KEY = bytes(range(32))
FIRST, SECOND, THIRD = (WeightVersion(f"step {number}", f"{number}" * 64) for number in (1, 2, 3))


def receipt(version=FIRST, arrival=Arrival.CONFIRMED, replica="a", rank=None, at=0.0, parent=None):
    return Receipt(
        parent=parent,
        version=version,
        engine="vllm",
        replica=replica,
        rank=rank,
        canary="c" * 64,
        tokens=512,
        sequences=32,
        arrival=arrival,
        cause="weights/stale" if arrival is Arrival.MISSED else None,
        message="",
        predicted=1e-3,
        error=1e-2,
        usual=1e-2,
        false_alarm=1e-4,
        at=at,
        seconds=1.0,
    )


def rollout(*labels):
    """Of versions, or of labels alone."""
    versions = [each if isinstance(each, WeightVersion) else WeightVersion(each) for each in labels]
    spans = tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions))
    return Completion(
        prompt_token_ids=(1,),
        token_ids=(2,) * len(labels),
        logprobs=(-1.0,) * len(labels),
        kind=LogprobKind.RAW,
        sampling=SamplingParams(),
        finish_reason=FinishReason.LENGTH,
        versions=spans,
        fingerprint="f",
    )


# The key


def test_a_key_is_read_as_it_was_made(tmp_path):
    path = tmp_path / "key"
    key = create_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) == key
    assert len(key) == 32
    with pytest.raises(UnsafePath):
        create_key(path)


@pytest.mark.parametrize("mode", [0o640, 0o644, 0o400, 0o700, 0o602])
def test_a_key_that_others_may_touch_is_refused(tmp_path, mode):
    create_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(UnsafePath):
        read_key(tmp_path / "key")


def test_a_key_is_a_plain_file(tmp_path):
    create_key(tmp_path / "key")
    (tmp_path / "link").symlink_to("key")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "none", "."):
        with pytest.raises(UnsafePath):
            read_key(tmp_path / name)
    os.link(tmp_path / "key", tmp_path / "second")
    with pytest.raises(UnsafePath):
        read_key(tmp_path / "key")


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"zz" * 32, b"\xff" * 64])
def test_what_is_no_key(tmp_path, content):
    path = tmp_path / "key"
    create_key(path)
    path.write_bytes(content)
    with pytest.raises(UnsafePath):
        read_key(path)


# The seal


def test_a_receipt_is_opened_with_its_key_alone():
    sealed = decode_receipt(msgspec.json.encode(seal(receipt(), KEY)), "here")
    assert opened(sealed, KEY) == receipt()
    with pytest.raises(NoReceipt):
        opened(sealed, bytes(32))


def test_whoever_edits_a_receipt_needs_the_key():
    edited = receipt(SECOND)
    for forged in (
        SealedReceipt(seal(receipt(), KEY).id, seal(receipt(), KEY).hmac, edited),
        SealedReceipt(edited.id, seal(receipt(), KEY).hmac, edited),
        SealedReceipt(edited.id, seal(edited, bytes(32)).hmac, edited),
    ):
        with pytest.raises(NoReceipt):
            opened(forged, KEY)


@pytest.mark.parametrize(
    "change",
    [
        {"arrival": Arrival.MISSED},
        {"cause": "weights/stale"},
        {"slope": float("nan")},
        {"error": float("inf")},
    ],
)
def test_a_receipt_that_cannot_be_true(change):
    fields = {name: getattr(receipt(), name) for name in Receipt.__struct_fields__}
    with pytest.raises(InvalidValue):
        Receipt(**fields | change)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\xff", b'{"id":"a","hmac":"b","receipt":{"schema":"x"}}']
)
def test_what_is_no_receipt(content):
    with pytest.raises(RecordError):
        decode_receipt(content, "here")


# The ledger


@pytest.fixture
def ledger(tmp_path):
    return ReceiptLedger(tmp_path, KEY)


def test_rollouts_are_let_in_by_the_receipt_of_their_version(ledger):
    """Also later than others were sent, and with two versions where the engine shows the digests of both."""
    ledger.append(receipt())
    made = [rollout("step 1"), rollout(FIRST, SECOND)]
    stamped = ledger.stamp(made[:1], "a")
    ledger.append(receipt(SECOND))
    stamped += ledger.stamp(made[1:], "a")
    assert [len(each.receipts) for each in stamped] == [1, 2]
    travelled = msgspec.json.decode(msgspec.json.encode(stamped), type=list[ReceiptedRollout])
    assert require_receipt(travelled, ledger) == made


def test_rollouts_without_one_are_refused(ledger):
    ledger.append(receipt())
    name = ledger.receipts[0].id
    for carried, label in (((), "step 1"), ((name,), "step 2"), (("0" * 64,), "step 1")):
        with pytest.raises(NoReceipt):
            require_receipt([ReceiptedRollout(rollout(label), carried)], ledger)
    with pytest.raises(InvalidValue):
        ReceiptedRollout(rollout("step 1"), ("no id",))


def test_a_digest_that_the_rollout_names_is_that_of_the_receipt(ledger):
    ledger.append(receipt())
    spans = (VersionSpan(WeightVersion("step 1", "9" * 64), 0, 1),)
    other = msgspec.structs.replace(rollout("step 1"), versions=spans)
    with pytest.raises(NoReceipt):
        require_receipt([ReceiptedRollout(other, (ledger.receipts[0].id,))], ledger)


@pytest.mark.parametrize("arrival", [Arrival.MISSED, Arrival.INCONCLUSIVE])
def test_nothing_is_stamped_until_a_receipt_holds_again(ledger, arrival):
    ledger.append(receipt())
    [before] = ledger.stamp([rollout("step 1")], "a")
    ledger.append(receipt(SECOND, arrival))
    for label in ("step 1", "step 2"):
        with pytest.raises(NoReceipt):
            ledger.stamp([rollout(label)], "a")
    # What was made under the version before is as good as it was.
    assert require_receipt([before], ledger)
    ledger.append(receipt(THIRD))
    assert ledger.stamp([rollout("step 3")], "a")


HELD = Arrival.INCONCLUSIVE
PARENT = {"parent": FIRST}


@pytest.mark.parametrize(
    ("said", "vouched"),
    [
        ([receipt(SECOND, HELD), receipt(SECOND, at=1.0)], True),
        ([receipt(SECOND), receipt(SECOND, at=1.0)], True),
        ([receipt(SECOND, Arrival.MISSED), receipt(SECOND, at=1.0)], False),
        ([receipt(SECOND, HELD, **PARENT), receipt(SECOND, at=1.0)], False),
        ([receipt(SECOND, HELD), receipt(SECOND, HELD, at=1.0), receipt(SECOND, at=2.0)], False),
        ([receipt(SECOND), receipt(SECOND, HELD, at=1.0), receipt(SECOND, at=2.0)], False),
    ],
    ids=["held", "twice", "missed", "inconclusive", "broken off", "sent twice"],
)
def test_a_label_that_was_sent_again_vouches_for_nothing(ledger, said, vouched):
    """What was made before it came could not be told from what was made after."""
    for each in said:
        ledger.append(each)
    if vouched:
        assert ledger.stamp([rollout("step 2")], "a")
        return
    with pytest.raises(NoReceipt, match="another label"):
        ledger.stamp([rollout("step 2")], "a")


def test_what_was_made_during_an_update_is_not_stamped_after_it(ledger):
    """An engine with half of step 2 still answers as step 1; nobody can tell later."""
    ledger.append(receipt())
    [before] = ledger.stamp([rollout("step 1")], "a")
    ledger.append(receipt(SECOND, HELD))
    ledger.append(receipt(THIRD))
    for made in (rollout("step 1"), rollout("step 1", "step 3")):
        with pytest.raises(NoReceipt, match="where they are made"):
            ledger.stamp([made], "a")
    assert ledger.stamp([rollout("step 3")], "a")
    assert require_receipt([before], ledger)
    # Nor by sending the old label once more.
    ledger.append(receipt(at=3.0))
    with pytest.raises(NoReceipt, match="where they are made"):
        ledger.stamp([rollout("step 1")], "a")
    assert ledger.stamp([rollout(FIRST)], "a")


def test_one_rank_without_it_holds_its_replica_back(ledger):
    ledger.append(receipt(rank=0))
    ledger.append(receipt(SECOND, Arrival.MISSED, rank=1))
    ledger.append(receipt(SECOND, rank=0))
    with pytest.raises(NoReceipt):
        ledger.stamp([rollout("step 2")], "a")


def test_one_rank_that_was_not_measured_holds_its_replica_back(ledger):
    for rank in (0, 1):
        ledger.append(receipt(rank=rank))
    assert ledger.stamp([rollout("step 1")], "a")
    ledger.append(receipt(SECOND, rank=0))
    with pytest.raises(NoReceipt, match="rank 1 of replica 'a'"):
        ledger.stamp([rollout("step 2")], "a")
    ledger.append(receipt(SECOND, rank=1))
    [stamped] = ledger.stamp([rollout("step 2")], "a")
    assert require_receipt([stamped], ledger)


def test_a_receipt_of_another_replica_does_not_do(ledger):
    ledger.append(receipt(replica="b"))
    with pytest.raises(NoReceipt):
        ledger.stamp([rollout("step 1")], "a")


def test_a_rollout_is_bound_to_its_replica_and_to_what_it_was(ledger):
    ledger.append(receipt())
    of_a = ledger.append(receipt(SECOND)).id
    ledger.append(receipt(SECOND, Arrival.MISSED, replica="b"))
    [stamped] = ledger.stamp([rollout("step 2")], "a")
    assert require_receipt([stamped], ledger)
    for forged in (
        ReceiptedRollout(rollout("step 2"), (of_a,)),
        ReceiptedRollout(rollout("step 2"), (of_a,), "a"),
        msgspec.structs.replace(stamped, replica="b"),
        msgspec.structs.replace(
            stamped, completion=msgspec.structs.replace(stamped.completion, logprobs=(-2.0,))
        ),
    ):
        with pytest.raises(NoReceipt, match="not stamped"):
            require_receipt([forged], ledger)


def test_what_was_stamped_travels_with_numbers_as_python_has_them(ledger):
    ledger.append(receipt())
    [stamped] = ledger.stamp([msgspec.structs.replace(rollout("step 1"), logprobs=(-1,))], "a")
    travelled = msgspec.json.decode(msgspec.json.encode(stamped), type=ReceiptedRollout)
    assert require_receipt([stamped, travelled], ledger)


def test_a_rollout_without_tokens_needs_a_receipt_too(ledger):
    with pytest.raises(NoReceipt):
        require_receipt(ledger.stamp([rollout()], "a"), ledger)
    ledger.append(receipt())
    with pytest.raises(NoReceipt, match="without tokens"):
        require_receipt([ReceiptedRollout(rollout(), ())], ledger)
    assert require_receipt(ledger.stamp([rollout()], "a"), ledger)


def test_weights_that_only_wrote_the_kv_need_a_receipt_too(ledger):
    ledger.append(receipt())
    ledger.append(receipt(SECOND, Arrival.MISSED))
    ledger.append(receipt(THIRD))
    made = [
        msgspec.structs.replace(rollout(THIRD), lineage=(LineageSegment(prompt, 0, 1),))
        for prompt in (FIRST, SECOND)
    ]
    [stamped] = ledger.stamp(made[:1], "a")
    assert len(stamped.receipts) == 2
    assert require_receipt([stamped], ledger)
    with pytest.raises(NoReceipt, match="missed"):
        ledger.stamp(made[1:], "a")


def output(**more):
    """Of the exact engine, at the third version."""
    plain = msgspec.structs.asdict(rollout(THIRD)) | {"lineage": (LineageSegment(THIRD, 0, 1),)}
    return Output(**plain, request_id="r", numeric={}, **more)


def test_an_adapter_beside_the_weights_needs_a_receipt_too(ledger):
    """That of the base says nothing of it, and none is taken of adapters."""
    ledger.append(receipt(THIRD))
    assert require_receipt(ledger.stamp([output()], "a"), ledger) == [output().completion()]
    with pytest.raises(NoReceipt, match="'policy-7'"):
        ledger.stamp([output(lora=AdapterVersion("policy-7", "d" * 64))], "a")


def test_weights_whose_kv_was_written_anew_since_need_a_receipt_too(ledger):
    """Kept over one update and recomputed at the next: neither the versions nor the lineage of the last token have them."""
    for each in (receipt(), receipt(SECOND, Arrival.MISSED), receipt(THIRD)):
        ledger.append(each)
    made = [output(past=(LineagePass(1, (LineageSegment(before, 0, 1),)),)) for before in (FIRST, SECOND)]
    [stamped] = ledger.stamp(made[:1], "a")
    assert len(stamped.receipts) == 2
    assert require_receipt([stamped], ledger) == [made[0].completion()]
    with pytest.raises(NoReceipt, match="missed"):
        ledger.stamp(made[1:], "a")
    # And one that is found missing later.
    ledger.append(receipt(arrival=Arrival.MISSED, at=1.0))
    with pytest.raises(NoReceipt):
        require_receipt([stamped], ledger)


def test_a_version_that_was_found_missing_later_is_refused(ledger):
    ledger.append(receipt())
    stamped = ledger.stamp([rollout("step 1")], "a")
    ledger.append(receipt(arrival=Arrival.MISSED, at=1.0))
    with pytest.raises(NoReceipt):
        require_receipt(stamped, ledger)


def versions(ledger):
    return [each.version for each in ledger.receipts]


def test_a_ledger_is_read_again(ledger, tmp_path):
    ledger.append(receipt())
    with (tmp_path / LOG).open("ab") as file:
        file.write(b'{"id": "torn')
    again = ReceiptLedger(tmp_path, KEY)
    assert versions(again) == [FIRST]
    again.append(receipt(SECOND))
    assert versions(ReceiptLedger(tmp_path, KEY)) == [FIRST, SECOND]


def test_a_ledger_that_was_edited_is_refused(ledger, tmp_path):
    ledger.append(receipt(arrival=Arrival.MISSED))
    path: Path = tmp_path / LOG
    line = path.read_bytes()
    path.write_bytes(line + line)
    with pytest.raises(RecordError):
        ReceiptLedger(tmp_path, KEY)
    path.write_bytes(line.replace(b'"missed"', b'"confirmed"').replace(b'"weights/stale"', b"null"))
    with pytest.raises(NoReceipt):
        ReceiptLedger(tmp_path, KEY)
    path.write_bytes(line)
    with pytest.raises(NoReceipt):
        ReceiptLedger(tmp_path, bytes(32))


def test_a_receipt_that_was_taken_out_is_missed(ledger, tmp_path):
    """A hole, wherever it is but at the end: what was missed would have been confirmed all along."""
    for arrival in (Arrival.CONFIRMED, Arrival.MISSED, Arrival.CONFIRMED):
        ledger.append(receipt(SECOND, arrival, at=float(len(ledger.receipts))))
    ledger.append(receipt(replica="b"))
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    for without in ([0], [1], [0, 1], [2], [1, 2]):
        (tmp_path / LOG).write_bytes(b"".join(line for at, line in enumerate(lines) if at not in without))
        with pytest.raises(RecordError):
            ReceiptLedger(tmp_path, KEY)
    (tmp_path / LOG).write_bytes(b"".join([lines[3], *lines[:3]]))
    with pytest.raises(RecordError):
        ReceiptLedger(tmp_path, KEY)


def test_the_last_receipt_of_one_rank_is_missed_by_that_of_another(ledger, tmp_path):
    for rank, arrival in enumerate((Arrival.CONFIRMED, Arrival.MISSED, Arrival.CONFIRMED)):
        ledger.append(receipt(arrival=arrival, rank=rank))
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(lines[0] + lines[2])
    with pytest.raises(RecordError):
        ReceiptLedger(tmp_path, KEY)


def test_a_ledger_of_another_schema_is_refused_by_its_name(ledger, tmp_path):
    ledger.append(receipt())
    log = tmp_path / LOG
    log.write_bytes(log.read_bytes().replace(SCHEMA.encode(), b"zerodrift.receipt/1"))
    with pytest.raises(SchemaMismatch, match="another directory"):
        ReceiptLedger(tmp_path, KEY)


def test_two_takers_with_a_ledger_each_see_each_others_receipts(tmp_path):
    """Of one directory, as two processes have it: one that misses stops the rollouts that the other would stamp."""
    one, other = ReceiptLedger(tmp_path, KEY), ReceiptLedger(tmp_path, KEY)
    first = one.append(receipt())
    assert other.stamp([rollout("step 1")], "a")[0].receipts == (first.id,)
    other.append(receipt(SECOND, Arrival.MISSED))
    with pytest.raises(NoReceipt):
        one.stamp([rollout("step 1")], "a")
    third = one.append(receipt(THIRD))
    assert [each.follows for each in ReceiptLedger(tmp_path, KEY).receipts] == [
        None,
        first.id,
        other.receipts[1].id,
    ]
    [stamped] = one.stamp([rollout("step 3")], "a")
    assert stamped.receipts == (third.id,)
    assert require_receipt([stamped], other)


def test_many_at_once_leave_every_line_whole(tmp_path):
    ledgers = [ReceiptLedger(tmp_path, KEY) for _ in range(4)]

    def write(number):
        for turn in range(12):
            ledgers[number % 4].append(receipt(replica=f"{number % 2}", at=float(100 * number + turn)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    assert len(ReceiptLedger(tmp_path, KEY).receipts) == 96


def test_a_line_that_no_receipt_has_is_refused_and_nothing_is_written_behind_it(ledger, tmp_path):
    ledger.append(receipt())
    with (tmp_path / LOG).open("ab") as file:
        file.write(b" " * MOST_LINE_BYTES + b"\n")
    for act in (lambda: ReceiptLedger(tmp_path, KEY), lambda: ledger.append(receipt(SECOND))):
        with pytest.raises(RecordError):
            act()


def test_numbers_are_read_as_they_are_sealed(ledger, tmp_path):
    """A whole number where a float belongs is written without a point, and was another receipt when it was read."""
    sealed = ledger.append(receipt(at=1))
    assert ReceiptLedger(tmp_path, KEY).receipts == ledger.receipts == (sealed.receipt,)
    with pytest.raises(InvalidValue):
        ledger.append(receipt(at=float("nan")))
    assert len(ReceiptLedger(tmp_path, KEY).receipts) == 1


@pytest.mark.parametrize("key", [b"", bytes(31), "0" * 32, None])
def test_a_ledger_has_a_key(tmp_path, key):
    with pytest.raises(InvalidValue):
        ReceiptLedger(tmp_path, key)


def test_threads_may_read_while_others_write(ledger, tmp_path):
    """Receipts of others come in where one thread reads and another goes through what is there."""
    writer = ReceiptLedger(tmp_path, KEY)
    writer.append(receipt())
    made, done = [rollout("step 1")] * 20, threading.Event()

    def read():
        while not done.is_set():
            ledger.stamp(made, "a")
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read) for _ in range(4)]
            for number in range(150):
                writer.append(receipt(replica=f"b{number}"))
            done.set()
            assert all(each.result() for each in readers)
    finally:
        done.set()
        sys.setswitchinterval(interval)


def test_an_engine_that_has_the_same_directory_is_not_waited_for(ledger, tmp_path):
    registry = Registry(tmp_path)
    ledger.append(receipt())
    registry.close()


@pytest.mark.parametrize("shortened", [0, 1, -1])
def test_a_ledger_that_shrinks_under_its_reader_is_refused(ledger, tmp_path, shortened):
    ledger.append(receipt())
    ledger.append(receipt(SECOND, Arrival.MISSED))
    lines = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(b"".join(lines)[:-1] if shortened < 0 else b"".join(lines[:shortened]))
    with pytest.raises(RecordError):
        ledger.stamp([rollout("step 1")], "a")
    (tmp_path / LOG).unlink()
    with pytest.raises(RecordError):
        ledger.append(receipt(at=2.0))


# Canaries


def test_canaries_are_numbered_by_sequence():
    canary = Canary(((1, 2, 3), (4, 5)))
    assert canary.tokens == 3
    assert canary.sequence.tolist() == [0, 0, 1]
    assert canary.flat("here", [[-1.0, -2.0], [-3.0]]).tolist() == [-1.0, -2.0, -3.0]
    with pytest.raises(InvalidValue):
        canary.flat("here", [[-1.0], [-3.0]])


def test_random_canaries_are_the_same_again():
    canary = random_canary(100, 250, avoid=(0, 1))
    assert canary == random_canary(100, 250, avoid=(0, 1))
    assert (len(canary.sequences), canary.tokens) == (32, 256)
    assert not {0, 1} & {token for ids in canary.sequences for token in ids}


def asked(*prompt):
    return msgspec.structs.replace(rollout("step 1", "step 1"), prompt_token_ids=prompt)


def test_rollouts_are_canaries_one_of_each_prompt_without_what_all_begin_with():
    """Samples of one prompt, and a template before all, are one witness as often as they stand there."""
    rollouts = [asked(7, 8, last) for last in (3, 3, 4, 4)]
    assert canary_of(rollouts).sequences == ((3, 2, 2), (4, 2, 2))
    assert canary_of(rollouts, longest=2).sequences == ((3, 2), (4, 2))
    assert canary_of([asked(7), asked(7, 8)]).sequences == ((2, 2), (8, 2, 2))
    with pytest.raises(InvalidPrompt):
        canary_of([asked(7, 8)] * 8)


@pytest.mark.parametrize(
    "sequences",
    [
        (),
        ((1, 2),),
        ((1, 2), (3,)),
        [(1, 2), (3, 4)],
        ((1, -2), (3, 4)),
        pytest.param(((1, 2), (3, 4), (1, 2)), id="one twice"),
    ],
)
def test_what_is_no_canary(sequences):
    with pytest.raises(InvalidPrompt):
        Canary(sequences)
