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


def serving(leg: str, cell: str, metric: str, ours: float, theirs: float | None) -> Run:
    """A leg of the serving suite, on five blocks; without `theirs` the other server answered 429 to everything."""
    arms, samples = ("gnomon", "mlx_lm.server"), []
    for block in range(5):
        for slot, (arm, value) in enumerate(zip(arms, (ours, theirs), strict=True)):
            changes = {"cell": cell, "work": records.WORK, "metrics": {metric: value * (1 + block / 500)}} if value else {
                "cell": cell, "status": "failed", "reason": "all 10 requests were refused: status 429"}  # fmt: skip
            samples.append(records.sample(2 * block + slot, block, arm, None, **changes))
    origin = records.provenance(model_path="/models/starter", model_sha256="5" * 64)
    return records.run(
        samples, id=f"{sum(map(ord, leg)):08x}", kind="serve", provenance=origin, complete=True, planned_blocks=5,
        name=f"serve, {leg}, {cell}, gnomon / mlx_lm.server, 5 blocks, seed 1",
        arms=tuple(Arm(name=name, kind="server") for name in arms),
        comparisons=(compare(samples, cell, "mlx_lm.server", "gnomon", metric, primary=True),),
    )  # fmt: skip


SERVING = (
    ("decode", "stream:1x64", records.RATE, 90.0, 30.0),
    ("poisson", "poisson:10x24@1.5:1:0.1", "goodput_requests_per_second", 1.25, None),
)


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
    legs = (serving(*leg) for leg in SERVING)
    for run in (load(REPLAY), three_arms(), quality("1", 1e8, 21.5), quality("2", 3e8, 17.25), hostile(), *legs):
        store.save(run)
    (directory / "20250101T000000Z-ab-00000000.json").write_text('{"format": 99}')
    (directory / "a:b <i>.json").write_text("no JSON")
    return store
