"""``python benchmarks/run.py`` is ``qed bench`` for a checkout that is not installed; peers: src/qed/bench/peers.py."""

import argparse
import sys

from qed.bench import add_arguments, bench

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    sys.exit(bench(parser.parse_args()))
