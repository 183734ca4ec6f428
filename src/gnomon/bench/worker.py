"""Child process of the native benchmark: loads one side, then answers a JSON line per workload on standard output.

`python -m gnomon.bench.worker SIDE MODEL SETTINGS`, SETTINGS a JSON object; its key `model_sha256` is passed through into the records.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from gnomon.bench.contenders import PROTOCOL
from gnomon.bench.workload import Cell, Unsupported, Workload


def _answer(side: Any, line: str) -> dict[str, Any]:
    order = json.loads(line)
    workload = Workload(Cell.parse(order["cell"]), order["seed"], order["block"], order["attempt"], order["timeout"])
    try:
        measured = side.measure(workload)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except Exception as error:  # noqa: BLE001  (the parent keeps the record: it hears of every failure as an answer)
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}
    return {"metrics": measured.metrics, "work": measured.work.model_dump(), "details": measured.details}


def serve(side: Any, orders: TextIO, answers: TextIO) -> None:
    """Say that the side is ready, then answer orders until they end."""
    answers.write(json.dumps({"ready": PROTOCOL, "effective": side.effective}, default=str) + "\n")
    answers.flush()
    for line in orders:
        answers.write(json.dumps(_answer(side, line)) + "\n")
        answers.flush()


def main(arguments: list[str]) -> int:
    """Run one side. Whatever libraries print goes to standard error, so that answers stay readable."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    from gnomon.bench.sides import SIDES

    name, path, text = arguments
    settings: dict[str, Any] = json.loads(text)
    sha = settings.pop("model_sha256", None)
    try:
        side = SIDES[name](Path(path), settings, sha)
    except Unsupported as error:
        answers.write(json.dumps({"unsupported": str(error)}) + "\n")
        answers.close()
        return 69
    except Exception as error:  # noqa: BLE001  (the parent keeps the record: a side that can't start says why)
        traceback.print_exc()
        answers.write(json.dumps({"ready": None, "error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.close()
        return 1
    try:
        serve(side, sys.stdin, answers)
    finally:
        side.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
