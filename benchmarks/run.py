"""``python benchmarks/run.py`` is ``qed bench`` for a checkout that is not installed; peers: src/qed/bench/peers.py."""

import sys

from qed.bench import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
