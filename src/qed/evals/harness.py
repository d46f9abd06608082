"""lm-eval's command line with this package's model type known to Transformers.

    python -m qed.evals.harness --model hf --tasks niah_single_1 \\
        --model_args pretrained=CHECKPOINT,max_length=4224 --metadata '{"max_seq_lengths": [1024, 2048, 4096]}'

All arguments go to lm-eval. ``max_length`` must be among them: this model has no limit to read from its config, and
lm-eval would take 2048 and cut the beginning of longer prompts with no more than a line in the log. Give the longest
length and 64 tokens more at least, because lm-eval does not count the answer prefix.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run lm-eval's command line; returns 2 with one line for what is missing."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "--model_args" in arguments and not any("max_length=" in argument for argument in arguments):
        print("--model_args needs max_length=N: the longest prompt and 64 tokens more", file=sys.stderr)
        return 2
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        print(f"lm-eval is missing ({error}): pip install 'qed-attention[eval]'", file=sys.stderr)
        return 2
    before, sys.argv = sys.argv, ["lm_eval", *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
    return 0


if __name__ == "__main__":
    sys.exit(main())
