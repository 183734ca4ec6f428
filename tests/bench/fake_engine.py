"""A worker that speaks the protocol of gnomon.bench.worker and misbehaves on order. No model, no MLX.

`python fake_engine.py '{"rate": 100, "faults": {"2": "crash"}}'`: `faults` maps a block number to what goes wrong in it.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    plan = json.loads(sys.argv[1])
    if plan.get("start") == "die":
        sys.stderr.write("no such model\n")
        sys.exit(3)
    ready = {"ready": plan.get("protocol", 1), "effective": {"seen": os.environ.get("OPENBLAS_NUM_THREADS", "unset")}}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        fault = plan.get("faults", {}).get(str(order["block"]))
        output = 32
        if fault == "crash":
            sys.stderr.write("device lost\n")
            sys.stderr.flush()
            os.abort()
        if fault == "stall":
            time.sleep(600)
        if fault == "count":
            output = 31
        if fault == "garbage":
            print("}{", flush=True)
            continue
        if fault == "raise":
            print(json.dumps({"error": "RuntimeError: out of memory"}), flush=True)
            continue
        if fault == "unsupported":
            print(json.dumps({"unsupported": "no such kernel here"}), flush=True)
            continue
        rate = plan["rate"] * (1 + 0.002 * ((order["seed"] * 7) % 5 - 2))
        metrics = {"decode_tokens_per_second": -rate if fault == "negative" else rate}
        if fault == "metric":
            metrics = {"speed": rate}
        work = {
            "task": "decode",
            "prompt": str(order["seed"]),
            "prompt_tokens": 1,
            "output_tokens": output,
            "machine": "m",
        }
        work |= plan.get("work", {})
        print(json.dumps({"metrics": metrics, "work": work, "details": {"pid": os.getpid()}}), flush=True)


if __name__ == "__main__":
    main()
