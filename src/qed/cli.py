"""The command line: one verb a room. Parses, calls, prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

from qed import __version__

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """One line for a wrong argument, naming the nearest right verb."""

    def error(self, message: str) -> NoReturn:
        print(f"qed: {message}", file=sys.stderr)
        sys.exit(USAGE_ERROR)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from qed.config import nearest

            self.error(nearest(str(action.metavar or action.dest), str(value), map(str, action.choices)))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(prog="qed", description="Query-aware linear attention: train, evaluate, look inside, report.")
    parser.add_argument("--version", action="version", version=f"qed {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="verb", required=True, parser_class=Parser)
    for add in (_reproduce, _train, _eval, _compare, _probe, _report, _explain, _data, _bench):
        add(verbs)
    options = parser.parse_args(arguments)
    try:
        return options.run(options) or 0
    except (ValueError, FileNotFoundError) as error:
        print(f"qed: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("\nstopped; what is finished is kept, and the same command goes on from there", file=sys.stderr)
        return INTERRUPTED


def _verb(verbs: Any, name: str, run: Callable[[argparse.Namespace], int | None], help: str, epilog: str = "") -> Any:
    parser = verbs.add_parser(
        name, help=help, description=help, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run)
    return parser


def _reproduce(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        from qed.study.presets import get_preset
        from qed.study.reproduce import reproduce

        study = _overridden(get_preset(options.preset), options.set)
        if options.arms:
            study = replace(study, arms=tuple(options.arms))
        if options.seeds is not None:
            study = replace(study, seeds=tuple(options.seeds))
        if options.data:
            study = replace(study, data=options.data)
        return reproduce(study, Path(options.out or f"runs/{study.preset}"), jobs=options.jobs)

    parser = _verb(
        verbs,
        "reproduce",
        run,
        "Train and evaluate the arms of a preset, then write the report.",
        "examples:\n  qed reproduce --preset laptop\n  qed reproduce --arms gdn2 qed qed-rand --seeds 0 1 2",
    )
    parser.add_argument("--preset", default="laptop", help="laptop (default) or smoke (seconds, learns nothing)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="instead of the preset's; a wrong name lists all")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument("--data", metavar="PATH", help="your own prose: .txt, .jsonl, .parquet, or a folder of them")
    parser.add_argument("--out", metavar="DIR", help="folder of the runs (default: runs/PRESET)")
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at a time (default: one a core)")
    _add_set(parser)


def _train(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        from qed.study.single import get_single, train_single
        from qed.train import CheckpointError, NonFiniteError, TrainingInterrupted

        config = _overridden(get_single(options.preset, options.arm, options.seed), options.set)
        try:
            return train_single(config, Path(options.data), Path(options.out), only_check=options.dry_run)
        except TrainingInterrupted as stopped:
            print(f"qed: {stopped}", file=sys.stderr)
            return INTERRUPTED
        except (CheckpointError, NonFiniteError) as error:
            print(f"qed: {error}", file=sys.stderr)
            return FAILED

    parser = _verb(verbs, "train", run, "Train one model on prepared token shards (see qed data prepare).")
    parser.add_argument("--preset", default="paper-340m", help="paper-340m (default) or tiny (seconds, to try things)")
    parser.add_argument("--arm", default="qed", help="gdn2, qed (default), ...; a wrong name lists all")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and row order (default: 0)")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder that qed data prepare wrote")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of this run")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything and print size, steps, time and memory"
    )
    _add_set(parser)


def _eval(verbs: Any) -> None:
    parser = verbs.add_parser("eval", help="Evaluate checkpoints.", description="Evaluate checkpoints.")
    parts = parser.add_subparsers(dest="evaluation", metavar="evaluation", required=True, parser_class=Parser)

    def add(name: str, help: str, *adders: Callable[[Any], None]) -> None:
        part = _verb(parts, name, lambda options: _evaluate(name, options), help)
        part.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="run folder or Hugging Face checkpoint")
        part.add_argument("--out", metavar="DIR", help="where results go (default: beside each checkpoint)")
        part.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
        part.add_argument("--dtype", help="float32, bfloat16 or float64 (default: bfloat16 on CUDA)")
        for adder in adders:
            adder(part)

    add("niah", "RULER's S-NIAH-1, -2, -3.", _add_niah)
    add(
        "strength", "All strengths times s, through prefill and decoding, paired with s = 1.", _add_niah, _add_strengths
    )
    add("recall", "FDA, SWDE and SQuAD completion.", _add_recall)
    add("loss", "Validation loss in nats by position.", _add_loss)
    add("all", "Everything; what is done is skipped.", _add_niah, _add_strengths, _add_recall_data, _add_loss_data)


def _add_niah(parser: Any) -> None:
    parser.add_argument("--tasks", nargs="+", metavar="TASK", help="niah_single_1, _2, _3 (default: the first)")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="N", help="nominal tokens (default: 1024 to 32768)")
    parser.add_argument("--num-examples", type=int, metavar="N", help="a task and length (default: 500)")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="generated and reserved (default: 128)")
    parser.add_argument("--fill", help="ruler (its own steps, default) or unit (single noise units)")
    parser.add_argument("--split", help="words and numbers: all (RULER, default), train or eval (the preset's halves)")
    parser.add_argument(
        "--essay",
        metavar="PATH",
        help="essays for S-NIAH-2 and -3: a .txt file, a folder of them, or embedded (Python's documentation)",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the examples (default: 0)")


def _add_strengths(parser: Any) -> None:
    parser.add_argument("--strengths", nargs="+", type=float, metavar="S", help="default: -1 0 0.5 1 1.5 2")


def _add_recall(parser: Any) -> None:
    parser.add_argument("--recall-tasks", nargs="+", metavar="TASK", help="fda, swde, squad_completion (default: all)")
    _add_recall_data(parser)


def _add_recall_data(parser: Any) -> None:
    parser.add_argument("--recall-data", metavar="DIR", help="folder of fda.jsonl, ... (default: lm-eval and the hub)")


def _add_loss(parser: Any) -> None:
    _add_loss_data(parser)


def _add_loss_data(parser: Any) -> None:
    parser.add_argument("--loss-data", metavar="PATH", help="validation text (default: the embedded prose)")
    parser.add_argument("--text-field", default="text", help="field that holds the text (default: text)")


def _evaluate(name: str, options: argparse.Namespace) -> int:
    from qed.evals import commands
    from qed.evals.config import NiahConfig
    from qed.evals.recall import RecallConfig

    given = vars(options)

    def config(cls: Any, **renamed: str) -> Any:
        named = {renamed.get(name, name): value for name, value in given.items() if value is not None}
        chosen = {field.name: named[field.name] for field in fields(cls) if field.name in named}
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in chosen.items()})

    common = {key: given[key] for key in ("out", "device", "dtype")}
    strengths = {"strengths": given["strengths"]} if given.get("strengths") else {}
    if name == "niah":
        rows = commands.niah(options.checkpoints, config=config(NiahConfig), **common)
    elif name == "strength":
        rows = commands.strength(options.checkpoints, config=config(NiahConfig), **strengths, **common)
    elif name == "recall":
        recall = config(RecallConfig, recall_tasks="tasks")
        rows = commands.recall(options.checkpoints, data=options.recall_data, config=recall, **common)
    elif name == "loss":
        text = {"data": options.loss_data, "text_field": options.text_field}
        rows = commands.loss(options.checkpoints, **text, **common)
    else:
        text = {"loss_data": options.loss_data, "text_field": options.text_field, "recall_data": options.recall_data}
        rows = commands.everything(options.checkpoints, niah=config(NiahConfig), **text, **strengths, **common)
    print(commands.table(rows))
    return 0


def _compare(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        from qed.evals import commands

        print(commands.table(commands.compare(options.first, options.second, out=options.out)))

    parser = _verb(
        verbs,
        "compare",
        run,
        "Differences between evaluated checkpoints, paired by example.",
        "example, three seeds:\n  qed compare --first runs/laptop/gdn2-seed* --second runs/laptop/qed-seed*",
    )
    parser.add_argument("--first", nargs="+", required=True, metavar="A", help="the baseline's checkpoints")
    parser.add_argument("--second", nargs="+", required=True, metavar="B", help="as many others, in the same order")
    parser.add_argument("--out", metavar="FILE", help="also write the result as JSON")


def _probe(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        from qed.evals.commands import table
        from qed.probes.commands import probe
        from qed.probes.measure import ProbeConfig

        names = [field.name for field in fields(ProbeConfig)]
        config = ProbeConfig(
            **{name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
        )
        keys = ("data", "text_field", "out", "device", "dtype")
        print(table(probe(options.checkpoints, config=config, **{key: getattr(options, key) for key in keys})))

    parser = _verb(verbs, "probe", run, "Measure the inside of the erase step, without changing the model.")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="run folder or checkpoint of this package")
    parser.add_argument("--data", metavar="PATH", help="text to read (default: needle prompts)")
    parser.add_argument("--text-field", default="text", help="field that holds the text (default: text)")
    parser.add_argument("--out", metavar="DIR", help="where results go (default: beside each checkpoint)")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    parser.add_argument("--dtype", help="float32, bfloat16 or float64 (default: bfloat16 on CUDA)")
    parser.add_argument("--length", type=int, metavar="N", help="tokens of a window (default: 2048)")
    parser.add_argument("--num-tokens", type=int, metavar="N", help="tokens in all (default: 16384)")
    parser.add_argument("--needle-length", type=int, metavar="N", help="of the needle examples (default: 1024)")
    parser.add_argument("--num-needles", type=int, metavar="N", help="needle examples, 0 for none (default: 4)")


def _report(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        from qed.records import write_text
        from qed.report import find_runs, report

        out = Path(options.out)
        as_file = out.suffix == ".html"
        page = report(
            find_runs(options.runs),
            out.with_suffix("") if as_file else out,
            title=options.title,
            label=options.label,
            benchmarks=options.benchmarks,
        )
        if as_file:
            write_text(out, page.read_text(encoding="utf-8"))
        print(out if as_file else page)

    parser = _verb(verbs, "report", run, "One self-contained page from run folders, with its figures and tables.")
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, or folders that hold them")
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder of page, figures and tables; PAGE.html puts the page there"
    )
    parser.add_argument("--title", default="Query-aware linear attention")
    parser.add_argument("--label", default="", help="stands beside the title, such as 'laptop scale'")
    parser.add_argument("--benchmarks", nargs="*", default=[], metavar="FILE", help="result files of qed bench")


def _explain(verbs: Any) -> None:
    def run(options: argparse.Namespace) -> None:
        from qed.report.explain import explain

        names = ("k", "q", "b", "state", "value", "strength", "figure")
        print(explain(**{name: getattr(options, name) for name in names}))

    parser = _verb(
        verbs,
        "explain",
        run,
        "One edit step by step in two dimensions, with numbers of your own if you like.",
        "example:\n  qed explain --q 0.6 0.8 --strength 0.25 --figure edit.svg",
    )
    for name, what in (("k", "key"), ("q", "query"), ("b", "erase gate"), ("state", "state before the edit")):
        parser.add_argument(f"--{name}", nargs=2, type=float, metavar=("X", "Y"), help=what)
    parser.add_argument("--value", type=float, help="the gated value to write")
    parser.add_argument("--strength", type=float, help="lambda")
    parser.add_argument("--figure", metavar="FILE", help="draw it too: .svg or .png")


def _data(verbs: Any) -> None:
    parser = verbs.add_parser("data", help="Prepare training text.", description="Prepare training text.")
    actions = parser.add_subparsers(dest="action", metavar="action", required=True, parser_class=Parser)

    def run(options: argparse.Namespace) -> None:
        from qed.data.prepare import PrepareConfig, prepare

        names = [field.name for field in fields(PrepareConfig)]
        chosen = {name: getattr(options, name) for name in names if getattr(options, name, None) is not None}
        print(json.dumps(prepare(PrepareConfig(**chosen), options.out), indent=1))

    prepare = _verb(actions, "prepare", run, "Tokenise text into memory-mapped shards with a manifest; resumable.")
    prepare.add_argument("--source", help="file, folder or hub id (default: HuggingFaceFW/fineweb-edu)")
    prepare.add_argument("--sample", help="configuration of the hub data set, such as sample-100BT")
    prepare.add_argument("--revision", help="branch, tag or commit of the hub data set")
    prepare.add_argument("--text-field", help="field that holds the text (default: text)")
    prepare.add_argument("--tokenizer", help="hub id, folder, or mistral-v1 (default: Llama-2's)")
    prepare.add_argument("--num-tokens", type=int, metavar="N", help="stop there (default: the whole source)")
    prepare.add_argument("--validation-share", type=float, metavar="P", help="documents held out (default: 0.0005)")
    prepare.add_argument("--out", required=True, metavar="DIR")


def _bench(verbs: Any) -> None:
    from qed.bench import add_arguments

    def run(options: argparse.Namespace) -> int:
        from qed.bench import bench

        return bench(options)

    parser = _verb(verbs, "bench", run, "Time the operator beside its peers; 'qed bench tune' rewrites the tile table.")
    add_arguments(parser)


def _add_set(parser: Any) -> None:
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="KEY=VALUE",
        help="change a field: train.learning_rate=1e-3",
    )


def _overridden(config: Any, assignments: Sequence[str]) -> Any:
    from qed.config import override

    for assignment in assignments:
        key, separator, value = assignment.partition("=")
        if not separator:
            raise ValueError(f"--set wants KEY=VALUE; got {assignment!r}")
        config = override(config, key, value)
    return config


if __name__ == "__main__":
    sys.exit(main())
