"""A store for the report without any model: the replay run, a quick run, models of two sizes, a hostile run, unreadable files."""

from __future__ import annotations

from pathlib import Path

from gnomon.bench.compare import compare
from gnomon.bench.schema import Arm, Run, Work
from gnomon.bench.store import Store, load

from . import records

REPLAY = Path(__file__).parent / "data" / "replay.json"
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">'\"&"


def quality(digit: str, size: float, perplexity: float) -> Run:
    work = Work(task="perplexity", model=digit * 64, prompt="d" * 64, prompt_tokens=512, machine="m2")
    sample = records.sample(0, 0, "gnomon", None, cell="text", status="ok", work=work,
                            metrics={"perplexity": perplexity, "weight_bytes": size})  # fmt: skip
    origin = records.provenance(
        model_path=f"/models/small-{digit}", model_sha256=digit * 64, machine="m2", device="gpu"
    )
    return records.run([sample], id=digit * 8, name=f"quality of small-{digit}", provenance=origin, complete=True,
                       arms=(Arm(name="gnomon", kind="engine"),))  # fmt: skip


def three_arms() -> Run:
    """A run cut short, on a busy machine: A and B are alike, C did other work."""
    other = records.WORK.model_copy(update={"output_tokens": 31})
    samples = [
        records.sample(3 * block + slot, block, arm, rate + block, metrics={
            records.RATE: rate + block, "peak_resident_bytes": size}, work=other if arm == "C" else records.WORK)
        for block in range(5)
        for slot, (arm, rate, size) in enumerate((("A", 100.0, 2e8), ("B", 120.0, 3e8), ("C", 900.0, 1e8)))
    ]  # fmt: skip
    return records.run(
        samples, id="3a3a3a3a", name="three arms", interruption="the lid was closed", diagnostic=True, kind="serve",
        preflight=records.preflight(verdict="busy", problems=("others use 40 % of the processors",)),
        arms=tuple(Arm(name=name, kind="settings") for name in "ABC"),
        comparisons=(compare(samples, "decode:32@0", "A", "B", records.RATE, primary=True),),
    )  # fmt: skip


def hostile() -> Run:
    """Everything that a result takes from outside is markup."""
    samples = [
        records.sample(n, n // 2, arm, 10.0 + n, cell=HOSTILE)
        for n, arm in enumerate([HOSTILE, "B"] * 5)
    ]  # fmt: skip
    samples.append(records.sample(10, 5, "B", None, cell=HOSTILE, status="failed", reason=HOSTILE))
    origin = records.provenance(model_path=f"/models/{HOSTILE}", processor=HOSTILE, system=HOSTILE, device=HOSTILE,
                                packages={HOSTILE: HOSTILE}, machine=HOSTILE)  # fmt: skip
    arms = (
        Arm(name=HOSTILE, kind="command", command=(HOSTILE,), settings={HOSTILE: HOSTILE}),
        Arm(name="B", kind="command"),
    )
    return records.run(samples, id="66666666", name=HOSTILE, provenance=origin, arms=arms, argv=(HOSTILE,), complete=True,
                       comparisons=(compare(samples, HOSTILE, HOSTILE, "B", records.RATE, primary=True),))  # fmt: skip


def fill(directory: Path) -> Store:
    """Save them all under `directory`."""
    store = Store(directory)
    for run in (load(REPLAY), three_arms(), quality("1", 1e8, 21.5), quality("2", 3e8, 17.25), hostile()):
        store.save(run)
    (directory / "20250101T000000Z-ab-00000000.json").write_text('{"format": 99}')
    (directory / "a:b <i>.json").write_text("no JSON")
    return store
