"""The bars of a study, on a screen that understands what tqdm sends: carriage return, line feed and cursor up."""

import io
import re
import sys

from qed.records import write_json, write_rows
from qed.study.progress import Bars


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def screen(self):
        lines, row, column = [""], 0, 0
        for piece in re.findall(r"\x1b\[A|[\r\n]|[^\x1b\r\n]+", self.getvalue()):
            if piece == "\x1b[A":
                row = max(0, row - 1)
            elif piece == "\r":
                column = 0
            elif piece == "\n":
                row, column = row + 1, 0
                lines += [""] * (row + 1 - len(lines))
            else:
                line = lines[row].ljust(column)
                lines[row] = line[:column] + piece + line[column + len(piece) :]
                column += len(piece)
        return [line.rstrip() for line in lines]


def test_a_study_shows_its_phases_and_what_waits_and_leaves_no_line(monkeypatch, tmp_path):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (one, two, three):
        write_rows(folder / "train.jsonl", [{"step": 3}])
    bars = Bars(10, 8)
    bars.update([one, two], num_waiting=1)
    shown = [line for line in terminal.screen() if line]
    assert shown[0] == "1 more to run"
    assert [re.match(r"(\w+ \w+): +(\d+)%", line).groups() for line in shown[1:]] == [
        ("one train", "30"),
        ("two train", "30"),
    ]

    write_json(one / "train.json", {})
    write_rows(one / "niah.jsonl", [{}] * 4)
    bars.update([one, two], num_waiting=1)
    bars.close([two])
    bars.update([one, three])
    shown = [line for line in terminal.screen() if line]
    assert sorted(re.match(r"(\w+ \w+): +(\d+)%", line).groups() for line in shown) == [
        ("one evaluate", "50"),
        ("three train", "30"),
    ]

    bars.end()
    terminal.write("the table\n")
    assert [line for line in terminal.screen() if line] == ["the table"]
    assert terminal.screen()[0] == "the table"
