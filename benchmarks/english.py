"""English prose for a training run where no hub can be reached: Debian's documentation packages to one .jsonl file.

    apt-get download $(python benchmarks/english.py --packages)    # 730 MB; the sources must name non-free
    python benchmarks/english.py *.deb --out english.jsonl          # 262 MB from Debian 12, 6 minutes on two cores
    qed data prepare --source english.jsonl --tokenizer mistral-v1 --validation-share 0.004 --out shards

The text is the RFC series and the manuals of free programs, written by people for people. Kept are whole paragraphs of
prose: at least ten words, mostly of letters, a fifth of them among the commonest English ones, ending as a sentence
does. Page headers, diagrams, tables, code, indices and every repetition of a paragraph (licences, boilerplate) fall
away. The same packages give the same bytes. Needs dpkg-deb and no package outside Python's own library.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import random
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PACKAGES = (
    "doc-rfc-std", "doc-rfc-std-proposed", "doc-rfc-old-std", "doc-rfc-fyi-bcp", "doc-rfc-informational",
    "doc-rfc-experimental", "doc-rfc-misc", "doc-rfc-others", "anarchism", "apache2-doc", "debian-faq",
    "debian-handbook", "debian-policy", "debian-reference-en", "developers-reference", "emacs-common-non-dfsg",
    "exim4-doc-html", "gcc-12-doc", "gdb-doc", "gimp-help-en", "git-doc", "glibc-doc-reference", "gnu-standards",
    "installation-guide-amd64", "libreoffice-help-en-us", "linux-doc-6.1", "octave-doc", "perl-doc",
    "postgresql-doc-15", "python3.11-doc", "sqlite3-doc", "vim-doc",
)  # fmt: skip
COMMON = frozenset(
    ("the", "of", "to", "and", "a", "in", "is", "that", "for", "it", "as", "be", "this", "with", "on", "are", "by",
     "or", "an", "not", "which", "from", "at", "can", "if")
)  # fmt: skip
MIN_WORDS, MIN_COMMON, MIN_LETTERS, MIN_DOCUMENT_WORDS = 10, 0.2, 0.75, 80

_FILE = re.compile(r"(rfc\d+\.txt|\.html|\.info(-\d+)?|\.pod)(\.gz)?$")
# A page's last line, and the first of the next.
_PAGE_BREAK = re.compile(
    r"\n[^\n]*\[Page [^\]\n]+\][^\n]*\n(?:[ \t]*\n)*\f?\n?(?:[^\n]*(?:RFC|19\d\d|20\d\d)[^\n]*\n)?"
)
_DROPPED = re.compile(r"<(script|style|pre|table|head|nav|svg|footer)\b.*?</\1\s*>", re.DOTALL | re.IGNORECASE)
_INLINE = re.compile(
    r"</?(?:a|abbr|acronym|b|cite|code|em|i|kbd|q|samp|span|strong|sub|sup|tt|u|var|small|font)\b[^>]*>", re.IGNORECASE
)
_TAG = re.compile(r"<[^>]*>")
_POD_CODE = re.compile(r"[A-Z]<+ ?([^<>|]*)(?:\|[^<>]*)? ?>+")
_WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*[,;:.!?)]*$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("debs", nargs="*", type=Path, help=".deb files, as apt-get download leaves them")
    parser.add_argument("--out", type=Path, default=Path("english.jsonl"))
    parser.add_argument("--packages", action="store_true", help="print the packages' names and stop")
    arguments = parser.parse_args()
    if arguments.packages:
        print(*PACKAGES)
        return
    if not arguments.debs:
        parser.error("name the packages' .deb files (--packages prints which)")
    debs = sorted(arguments.debs, key=lambda path: path.name)
    seen: set[bytes] = set()
    sizes: Counter[str] = Counter()
    documents: list[dict[str, str]] = []
    with ProcessPoolExecutor() as pool:
        for deb, found in zip(debs, pool.map(read_package, debs), strict=True):
            package = deb.name.partition("_")[0]
            for name, paragraphs in found:
                text = "\n\n".join(paragraph for paragraph in paragraphs if is_new(paragraph, seen))
                if text.count(" ") + 1 >= MIN_DOCUMENT_WORDS:
                    documents.append({"text": text, "source": f"{package}/{name}"})
                    sizes[deb.name] += len(text.encode())
            print(f"{sizes[deb.name] / 1e6:7.1f} MB  {deb.name}", flush=True)
    # So that every stretch of the file holds every kind of text.
    random.Random(0).shuffle(documents)
    with open(arguments.out, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    print(f"{sum(sizes.values()) / 1e6:7.1f} MB  {len(documents)} documents: {arguments.out}")


def read_package(deb: Path) -> list[tuple[str, list[str]]]:
    """Paragraphs of prose of every text file in a package, in the order of names."""
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE)
    found = []
    with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
        for member in archive:
            match = _FILE.search(member.name)
            if match and member.isfile():
                data = archive.extractfile(member).read()  # type: ignore[union-attr]
                data = gzip.decompress(data) if match[0].endswith(".gz") else data
                paragraphs = list(prose(blocks(data.decode("utf-8", "replace"), match[1])))
                if paragraphs:
                    found.append((member.name.rpartition("/")[2], paragraphs))
    if process.wait():
        raise SystemExit(f"dpkg-deb cannot read {deb}")
    return sorted(found)


def blocks(text: str, kind: str) -> list[str]:
    """Candidates for paragraphs, lines still broken; of plain text, indented or not."""
    text = text.replace("\r\n", "\n")
    if kind == ".html":
        text = _TAG.sub("\n\n", _INLINE.sub("", _DROPPED.sub("\n\n", text)))
        return [html.unescape(block) for block in re.split(r"\n\s*\n", text)]
    if kind == ".pod":
        return [_POD_CODE.sub(r"\1", block) for block in text.split("\n\n") if not block.startswith(("=", " ", "\t"))]
    # A paragraph that goes on over the page goes on here.
    text = _PAGE_BREAK.sub("\n", text).replace("\f", "\n")
    text = re.sub(r"([a-z,])\n(?:[ \t]*\n)+(?=[ \t]+[a-z])", r"\1\n", text)
    return re.split(r"\n[ \t]*\n", text)


def prose(candidates: list[str]) -> Iterator[str]:
    """Those that read as sentences, each on one line."""
    for block in candidates:
        # Columns: more than a sentence's two spaces between words.
        if re.search(r"\S {3,}\S", block) or "|" in block or "+-" in block:
            continue
        words = block.split()
        if len(words) < MIN_WORDS or not words[-1].rstrip("\"')”’").endswith((".", ":", "?", "!", ";")):
            continue
        if not words[0].lstrip("\"'(`“‘[")[:1].isupper():
            continue
        common = sum(word.lower().rstrip(",.;:") in COMMON for word in words)
        letters = sum(_WORD.match(word.lstrip("\"'(`“‘")) is not None for word in words)
        if common >= MIN_COMMON * len(words) and letters >= MIN_LETTERS * len(words):
            yield " ".join(words)


def is_new(paragraph: str, seen: set[bytes]) -> bool:
    """Whether the paragraph, numbers and case aside, has not been met."""
    key = hashlib.blake2b(re.sub(r"[\W\d_]+", " ", paragraph).lower().encode(), digest_size=8).digest()
    if key in seen:
        return False
    seen.add(key)
    return True


if __name__ == "__main__":
    main()
