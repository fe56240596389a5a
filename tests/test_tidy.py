"""Properties of the code itself: sizes, words that must not be in it, files that nobody uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FUNCTION_LINES_MAX = 70
CODE = sorted([*ROOT.glob("dlctl/**/*.py"), *ROOT.glob("daemons/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))
TOP_LEVEL = {
    "pyproject.toml", "dlctl", "daemons", "tests", "examples", "docs", "benchmarks", "README.md",
    "RELIABILITY.md", "SECURITY.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile",
    "constraints.txt", "mkdocs.yml",
}  # fmt: skip
BANNED = {
    r"\bpickle\b|\brecv_pyobj\b|\bsend_pyobj\b": "nothing is ever unpickled",
    r"\bshell=True\b|\bos\.system\b": "processes are started from argument lists",
    r"(?<![\w.])eval\(|(?<![\w.])exec\(": "data never becomes code",
    r"\bROUTING_ID\b(?!`)": "a fixed routing id loses messages after a reconnect",
    r"\bTODO\b|\bFIXME\b|\bXXX\b": "unfinished work belongs in an issue",
    r"except:|except BaseException: pass": "no error is swallowed",
    r"yaml\.load|torch\.load\((?!.*weights_only=True)": "files are read without running code",
}
TAKEN_BY_OTHERS = {
    "daemonize", "daemonizer", "interfaces", "message", "pid", "prefab", "signal", "startstop",
}  # fmt: skip


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed() -> dict[str, ast.Module]:
    return {name(path): ast.parse(path.read_text()) for path in CODE}


def test_functions_are_small_and_every_module_says_what_it_is() -> None:
    large, silent = {}, []
    for file, tree in parsed().items():
        sizes = {f.name: (f.end_lineno or 0) - f.lineno + 1 for f in functions(tree)}
        large |= {f"{file}: {f}": n for f, n in sizes.items() if n > FUNCTION_LINES_MAX}
        if tree.body and not ast.get_docstring(tree):
            silent.append(file)
    assert large == {}
    assert silent == []


def test_no_banned_word_is_in_the_code() -> None:
    found = {}
    for path in CODE:
        code = "\n".join(line.partition("# ")[0] for line in path.read_text().splitlines())
        hits = {word: re.search(word, code) for word in BANNED}
        found |= {f"{name(path)}: {hit[0]}": BANNED[word] for word, hit in hits.items() if hit}
    assert found == {}


def test_tests_neither_sleep_nor_expect_to_fail() -> None:
    words = re.compile(r"time\.sleep\(|\bxfail\b|pytest\.mark\.skip\b")
    texts = {name(path): path.read_text() for path in TESTS if path != Path(__file__)}
    assert {file: found for file, text in texts.items() if (found := words.findall(text))} == {}


def test_nothing_but_the_planned_folders_stands_at_the_top() -> None:
    visible = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    generated = {"runs", "build", "dist", "__pycache__"} | {
        n for n in visible if n.endswith(".egg-info")
    }
    assert visible - generated <= TOP_LEVEL


def test_the_daemons_package_keeps_clear_of_another_ones_modules() -> None:
    """PyPI has a package `daemons`, too. Both can be installed while no submodule has one name."""
    ours = {path.stem for path in (ROOT / "daemons").iterdir()}
    assert ours & TAKEN_BY_OTHERS == set()
    tree = ast.parse((ROOT / "daemons" / "__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) for node in tree.body)


def test_every_module_is_used_somewhere() -> None:
    """A dead file is one whose name is in no import, registry entry or command line."""
    sources = [*CODE, ROOT / "Makefile"]
    words = {path: set(re.findall(r"\w+", path.read_text())) for path in sources}
    dead = []
    for path in CODE:
        if path.name in ("__init__.py", "__main__.py"):
            continue
        if not any(path.stem in found for other, found in words.items() if other != path):
            dead.append(name(path))
    assert dead == []
