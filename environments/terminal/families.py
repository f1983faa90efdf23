"""Kinds of tasks: each draws files, a prompt, the expected final state, and a command that produces it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from forge_env.sandbox import WORK

WORDS = (
    *("amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "iris", "jade", "koala", "lotus"),
    *("maple", "nectar", "onyx", "pearl", "quartz", "raven", "sable", "topaz", "umber", "violet", "willow", "yarrow"),
)
LEVELS = ("INFO", "WARN", "ERROR")


@dataclass(frozen=True, slots=True)
class Work:
    """A drawn task: initial `files`, `expected` final state (see `state.problems`), and the solving command `gold`."""

    prompt: str
    files: dict[str, str]
    expected: dict[str, Any]
    gold: str
    difficulty: int

    def divided(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split the expected state into `(not revealed, revealed)` by the prompt and the files."""
        shown = [self.prompt, *self.files.values()]
        known = {path: want for path, want in self.expected.items() if _is_told(want, shown)}
        return {path: want for path, want in self.expected.items() if path not in known}, known


def _is_told(want: Any, shown: list[str]) -> bool:
    if isinstance(want, dict):
        return True  # kinds and modes of files are part of the prompt
    return want is None or any(want in text for text in shown)


Family = Callable[[Random], Work]


def _log(rng: Random, lines: int) -> list[str]:
    times = sorted(f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}" for _ in range(lines))
    return [f"{time} {rng.choice(LEVELS)} {rng.choice(WORDS)} {rng.randint(1, 999)}" for time in times]


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def count_lines(rng: Random) -> Work:
    """Count the lines of a log with one level."""
    lines, level = _log(rng, rng.randint(20, 60)), rng.choice(LEVELS)
    count = sum(f" {level} " in line for line in lines)
    return Work(
        f"Count the lines of app.log whose level is {level} and write the number to count.txt.",
        {"app.log": _text(lines)},
        {"count.txt": str(count), "app.log": _text(lines)},
        f"grep -c ' {level} ' app.log > count.txt",
        1,
    )


def sort_unique(rng: Random) -> Work:
    """Sort the distinct words of a file."""
    words = [rng.choice(WORDS) for _ in range(rng.randint(12, 40))]
    return Work(
        "Write every distinct line of words.txt once, in alphabetical order, to sorted.txt.",
        {"words.txt": _text(words)},
        {"sorted.txt": _text(sorted(set(words))), "words.txt": _text(words)},
        "LC_ALL=C sort -u words.txt > sorted.txt",
        1,
    )


def rename_suffix(rng: Random) -> Work:
    """Rename the files of a folder with one suffix to another suffix."""
    old, new = rng.sample(["txt", "md", "rst", "log", "dat"], 2)
    names = rng.sample(WORDS, rng.randint(4, 7))
    files = {f"docs/{name}.{old}": f"{name} {rng.randint(100, 999)}\n" for name in names[:-1]}
    other = f"docs/{names[-1]}.csv"
    files[other] = "kept,as,it,is\n"
    moved = {path.removesuffix(old) + new: text for path, text in files.items() if path.endswith(f".{old}")}
    gone: dict[str, Any] = {path: None for path in files if path != other}
    return Work(
        f"Rename every .{old} file in the folder docs so that it ends in .{new} instead. Leave other files alone.",
        files,
        {**moved, **gone, other: files[other]},
        f'for f in docs/*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done',
        1,
    )


def replace_word(rng: Random) -> Work:
    """Replace a word in every file below a folder."""
    old, new, *others = rng.sample(WORDS, 8)
    files: dict[str, str] = {}
    for name in ("conf/main.ini", "conf/extra/user.ini", "conf/extra/deep/site.ini", "notes.ini"):
        pairs = [f"{rng.choice(others)} = {rng.choice([old, *others])}" for _ in range(rng.randint(3, 8))]
        files[name] = _text([*pairs, f"name = {old}"])
    changed = {path: text.replace(old, new) if path.startswith("conf/") else text for path, text in files.items()}
    return Work(
        f"In every file below the folder conf, at any depth, replace the word {old} by {new}. Change nothing else.",
        files,
        changed,
        f"find conf -type f -exec sed -i 's/{old}/{new}/g' {{}} +",
        2,
    )


def sum_column(rng: Random) -> Work:
    """Sum over the rows of a table with one key."""
    keys = rng.sample(WORDS, 4)
    rows = [(rng.choice(keys), rng.randint(1, 90), rng.randint(1, 20)) for _ in range(rng.randint(15, 40))]
    wanted = rows[0][0]
    table = _text(["item,price,amount", *(f"{item},{price},{amount}" for item, price, amount in rows)])
    total = sum(price * amount for item, price, amount in rows if item == wanted)
    return Work(
        f"sales.csv has the columns item, price and amount. Write the sum of price times amount of all rows whose item "
        f"is {wanted} to total.txt.",
        {"sales.csv": table},
        {"total.txt": str(total), "sales.csv": table},
        f"awk -F, '$1 == \"{wanted}\" {{ s += $2 * $3 }} END {{ print s }}' sales.csv > total.txt",
        2,
    )


def sort_into_folders(rng: Random) -> Work:
    """Move files into folders named after their suffix."""
    kinds = rng.sample(["txt", "csv", "log", "ini"], 3)
    names = rng.sample(WORDS, 7)
    files = {f"{name}.{rng.choice(kinds)}": f"{name} {rng.randint(100, 999)}\n" for name in names}
    expected: dict[str, Any] = {f"{name.rpartition('.')[2]}/{name}": text for name, text in files.items()}
    expected.update(dict.fromkeys(files))
    return Work(
        "Move each file into a folder named after its suffix: a.txt to txt/a.txt, and so on. Make the folders needed.",
        files,
        expected,
        'for f in *.*; do d="${f##*.}"; mkdir -p "$d"; mv "$f" "$d/"; done',
        2,
    )


def delete_empty(rng: Random) -> Work:
    """Delete empty files and keep all others."""
    names = rng.sample(WORDS, 9)
    folders = ("", "a/", "a/b/")
    files = {f"{rng.choice(folders)}{name}": "" if index < 4 else f"{name}\n" for index, name in enumerate(names)}
    return Work(
        "Delete every empty file, in all folders, and nothing else.",
        files,
        {path: text or None for path, text in files.items()},
        "find . -type f -empty -delete",
        1,
    )


def top_word(rng: Random) -> Work:
    """Find the most frequent component of a log."""
    while True:
        lines = _log(rng, rng.randint(25, 60))
        (first, most), (_, second) = Counter(line.split()[2] for line in lines).most_common(2)
        if most > second:
            break
    return Work(
        "Each line of app.log is: time, level, component, number. Find the component with the most lines and write "
        "its name and how many lines it has, separated by a space, to top.txt.",
        {"app.log": _text(lines)},
        {"top.txt": f"{first} {most}"},
        "awk '{ n[$3]++ } END { for (w in n) print n[w], w }' app.log | sort -rn | head -n 1 "
        "| awk '{ print $2, $1 }' > top.txt",
        3,
    )


def make_runnable(rng: Random) -> Work:
    """Make a script executable and create a link to it."""
    name, other = rng.sample(WORDS, 2)
    script = f"#!/bin/sh\necho {name}\n"
    path = f"bin/{name}.sh"
    return Work(
        f"Make {path} executable, leave bin/{other}.sh as it is, and create a symbolic link run in this folder that "
        f"points to {path}.",
        {path: script, f"bin/{other}.sh": script},
        {"run": {"link": [path, f"./{path}", f"{WORK}/{path}"]}, path: {"executable": True},
         f"bin/{other}.sh": {"executable": False}},
        f"chmod +x {path} && ln -s {path} run",
        2,
    )  # fmt: skip


def merge_tables(rng: Random) -> Work:
    """Join two files by a key."""
    keys = sorted(rng.sample(WORDS, rng.randint(5, 9)))
    left = {key: rng.randint(10, 99) for key in keys}
    right = {key: rng.choice(WORDS) for key in keys if rng.random() < 0.7}
    shuffled = rng.sample(keys, len(keys))
    files = {
        "ages.csv": _text([f"{key},{left[key]}" for key in shuffled]),
        "towns.csv": _text([f"{key},{right[key]}" for key in reversed(shuffled) if key in right]),
    }
    merged = [f"{key},{left[key]},{right[key]}" for key in keys if key in right]
    return Work(
        "ages.csv holds name,age and towns.csv holds name,town, neither in any order. Write name,age,town of every "
        "name that is in both, in alphabetical order, to both.csv.",
        files,
        {**files, "both.csv": _text(merged)},
        "LC_ALL=C sort ages.csv > .a; LC_ALL=C sort towns.csv > .b; LC_ALL=C join -t, .a .b > both.csv; rm .a .b",
        3,
    )


FAMILIES: dict[str, Family] = {
    family.__name__: family
    for family in (
        count_lines,
        sort_unique,
        rename_suffix,
        replace_word,
        sum_column,
        sort_into_folders,
        delete_empty,
        top_word,
        make_runnable,
        merge_tables,
    )
}
