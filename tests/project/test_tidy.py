"""Properties of the code itself: sizes, words that must not be in it, files that nobody uses."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
CODE = sorted([*ROOT.glob("dlctl/**/*.py"), *ROOT.glob("daemons/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))
TOP_LEVEL = {
    "pyproject.toml", "dlctl", "daemons", "tests", "examples", "docs", "man", "benchmarks",
    "README.md", "RELIABILITY.md", "SECURITY.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md",
    "Makefile", "constraints.txt", "mkdocs.yml", "hatch_build.py", "Dockerfile",
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
OPENED_OTHERWISE = {
    "dlctl/util/regular.py": "it is the helper",
    "dlctl/util/outfile.py": "what a user names is written to, whatever it is",
    "dlctl/util/fsync.py": "new files, and directories",
    "dlctl/runs/paths.py": "directories",
    "daemons/files/file_sender.py": "directories",
    "daemons/coordinator/tensorboard.py": "new files",
    "daemons/files/export.py": "a new file",
    "daemons/files/file_receiver.py": "new files",
    "daemons/files/log_mirror.py": "new files",
    "daemons/server/disklog.py": "new files",
    "daemons/worker/ack_record.py": "new files",
    "dlctl/ops/graft.py": "new files",
    "dlctl/stores/fsspec_objects.py": "objects of a store",
    "dlctl/runs/task_code.py": "new files",
    "daemons/node/begin.py": "files in a new directory",
    "daemons/server/files.py": "/proc",
    "daemons/log_tail.py": "a descriptor of the helper's",
    "daemons/worker/data/loader_stacks.py": "/proc",
    "daemons/worker/batch_size_search.py": "/proc, /sys",
    "dlctl/util/cores.py": "/proc, /sys",
    "dlctl/util/processes.py": "/proc",
    "daemons/template/command_line.py": "/proc",
    "daemons/transport/shm.py": "memory of another process",
    "daemons/worker/hogwild/workers.py": "memory of another process",
    "dlctl/cli/commands/init.py": "a part of the package",
    "dlctl/cli/commands/man.py": "a part of the package",
    "dlctl/observe/html.py": "a part of the package",
    "daemons/process.py": "/dev/null",
    "daemons/template/spares.py": "/dev/null",
    "daemons/tracker/__main__.py": "/dev/null",
    "dlctl/cli/ui/console.py": "/dev/null",
    "daemons/worker/replica_group.py": "no file",
    "daemons/worker/data/stream_loader.py": "no file",
}
"""Who opens what without `dlctl.util.regular`."""
FOLDERS = [ROOT, *(ROOT / name for name in ("dlctl", "daemons", "docs", "examples", "tests"))]
"""A path in a document or a comment begins in one of these, or beside the file that has it."""
FILE_NAME = re.compile(r"(?<![\w/.\-~$*{}<>])((?:[\w\-]+/)*[\w\-]+\.(?:py|md|toml))\b(?![\w/*(])")

TAKEN_BY_OTHERS = {
    "daemonize", "daemonizer", "interfaces", "message", "pid", "prefab", "signal", "startstop",
}  # fmt: skip


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree) if isinstance(node, kinds))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def ours(path: Path) -> bool:
    """Whether it is no part of an environment, a cache, a run or a build."""
    parts = path.relative_to(ROOT).parts
    return not {"runs", "build", "dist", "__pycache__"} & {*parts[:-1], *parts[-1:]} and not any(
        part.startswith(".") for part in parts
    )


@cache
def tree_of(path: Path) -> ast.Module:
    """Several tests look at it, and to parse all of them takes seconds."""
    return ast.parse(path.read_text())


def parsed() -> dict[str, ast.Module]:
    return {name(path): tree_of(path) for path in CODE}


def test_functions_are_small_and_every_module_says_what_it_is() -> None:
    large, silent = {}, []
    for file, tree in parsed().items():
        for f in functions(tree):  # By line: classes have functions of the same names.
            lines = (f.end_lineno or 0) - f.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                large[f"{file}:{f.lineno}: {f.name}"] = lines
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


def opens_by_itself(call: ast.Call) -> bool:
    """Whether this opens a file by a name that may be one of a FIFO or a device."""
    of = call.func
    word = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
    if word not in ("open", "read_bytes", "read_text", "write_bytes", "safe_open", "copyfile"):
        return False
    return not ast.unparse(call).startswith(("regular.", "safe_open(regular.name_of("))


def test_files_are_opened_only_if_they_are_regular() -> None:
    """Else a FIFO in the place of a file keeps a process waiting for ever."""
    found = {
        file
        for file, tree in parsed().items()
        if any(isinstance(node, ast.Call) and opens_by_itself(node) for node in ast.walk(tree))
    }
    assert found == OPENED_OTHERWISE.keys()


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


def prose(path: Path) -> str:
    """A document; of a module its comments and docstrings, those of fields too, or nothing if no
    name in it would be looked at: to parse all modules takes seconds.
    """
    text = path.read_text()
    if path.suffix != ".py":
        return text
    if not any("/" in found or path in CODE for found in FILE_NAME.findall(text)):
        return ""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.append(str(node.value.value))
    return "\n".join(found)


def test_every_file_of_the_project_that_a_text_names_exists() -> None:
    """A path whose first folder is not the project's, and a bare name, may be a user's file; those
    between backticks in the code are ours.
    """
    code = [*CODE, *TESTS, *ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("docs/*.py"),
            *ROOT.glob("examples/*/*.py")]  # fmt: skip
    documents = [path for path in ROOT.glob("**/*.md") if ours(path)]
    names = {path.name for path in ROOT.glob("**/*.*") if ours(path)}
    folders = {folder.name for folder in ROOT.glob("**/") if ours(folder) and folder != ROOT}
    missing = []
    for path in [*code, *documents]:
        text = prose(path)
        for found in FILE_NAME.findall(text):
            first, is_path, _ = found.partition("/")
            if not is_path:
                if path in CODE and f"`{found}`" in text and found not in names:
                    missing.append((name(path), found))
            elif first in folders and not any(
                (folder / found).exists() for folder in (*FOLDERS, path.parent)
            ):
                missing.append((name(path), found))
    assert missing == []


SIDES = {"Options", "Replica", "Server", "Shard", "Lead"}
"""The classes of a method, in its own file; `Options` also of a launcher."""


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for module, tree in parsed().items():
        own = SIDES if module.startswith("dlctl/algorithms/") else {"Options"}
        for part in tree.body:
            if isinstance(part, ast.ClassDef) and not part.name.startswith("_"):
                found.setdefault(part.name, []).extend([module] * (part.name not in own))
    assert {kind: modules for kind, modules in found.items() if len(modules) > 1} == {}
