"""Every benchmark, or those named; the tables on the screen and one JSON file with the figures and what they were taken on.

make bench [ARGS="encode cast --rounds 9 --json FILE"]
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from pathlib import Path

from .support import Record, environment

NAMES = ("encode", "decode", "cast", "features", "dropin", "processors", "transport")


def present() -> list[str]:
    return [name for name in NAMES if Path(__file__).with_name(f"bench_{name}.py").exists()]


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(NAMES)} (all)")
    parser.add_argument("--rounds", type=int, help="rounds per case; fewer are quicker and less sure")
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"), help="where the figures go (%(default)s)")
    options = parser.parse_args()
    unknown = set(options.names) - set(present())
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(present())}")
    described = environment()
    print("\n".join(f"{key:14}{value}" for key, value in described.items()), end="\n\n")
    records: list[Record] = []
    for name in options.names or present():
        module = importlib.import_module(f"bench.bench_{name}")
        start = time.perf_counter()
        found = module.run(rounds=options.rounds)
        module.show(found)
        print(f"({name}: {time.perf_counter() - start:.0f} s)\n", flush=True)
        records += found
    bars = [r for r in records if r["kind"] == "bar" and r["met"] is not None]
    print(f"{sum(r['met'] for r in bars)} of {len(bars)} bars met")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"environment": described, "records": records}, indent=1) + "\n")
    print(f"figures in {options.json}")


if __name__ == "__main__":
    main()
