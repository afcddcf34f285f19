"""Post-import hooks and the patch registry, on made-up modules."""

import importlib
import inspect
import sys
import types

import pytest

from slideformer_backend._imports import PostImportFinder
from slideformer_backend.integrations.patches import Patch, PatchRegistry


@pytest.fixture
def finder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    finder = PostImportFinder()
    finder.install()
    yield finder
    finder.remove()
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_called_once_after_the_body_with_the_modules_own_loader(finder, tmp_path):
    (tmp_path / "late_one.py").write_text("value = 1\ndef f():\n    return 'source'\n")
    seen = []
    finder.register("late_one", lambda module: seen.append((module.value, type(module.__loader__).__name__)))
    assert seen == []
    module = importlib.import_module("late_one")
    importlib.import_module("late_one")
    assert seen == [(1, "SourceFileLoader")]
    assert "return 'source'" in inspect.getsource(module.f)
    assert module.__spec__.loader is module.__loader__


def test_called_at_once_for_a_module_that_is_there(finder, tmp_path):
    (tmp_path / "early_one.py").write_text("value = 1\n")
    importlib.import_module("early_one")
    seen = []
    finder.register("early_one", lambda module: seen.append(module.value))
    assert seen == [1]


@pytest.mark.parametrize("first", ["from half import value", "import half", "import half.deep"])
def test_called_before_anybody_uses_a_module_whose_body_was_running(finder, tmp_path, first):
    """As with `import accelerate` first: torch, imported by accelerate.accelerator, calls us back half way."""
    package = tmp_path / "half"
    package.mkdir()
    (package / "__init__.py").write_text("from .deep import value\n")
    (package / "deep.py").write_text("value = 'stock'\nimport caller\nother = 2\n")
    seen = []

    def patch(module):
        seen.append(sorted(name for name in vars(module) if not name.startswith("_")))
        module.value = "patched"

    class Caller:
        """Registers while ``half.deep`` is being imported: what an import of torch in it does."""

        def find_spec(self, name, path=None, target=None):
            if name == "caller":
                finder.register("half.deep", patch)
            return None

    (tmp_path / "caller.py").write_text("")
    watcher = Caller()
    sys.meta_path.insert(0, watcher)
    try:
        names = {}
        exec(first, names)
    finally:
        sys.meta_path.remove(watcher)
    assert seen == [["caller", "other", "value"]]
    assert sys.modules["half"].value == "patched"
    assert type(sys.modules["half.deep"]) is types.ModuleType


def test_a_module_that_is_missing_now_may_come_later(finder, tmp_path):
    seen = []
    finder.register("comes_later", seen.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("comes_later")
    (tmp_path / "comes_later.py").write_text("")
    importlib.invalidate_caches()
    importlib.import_module("comes_later")
    assert len(seen) == 1


class Base:
    def inherited(self):
        return "inherited"


class Subject(Base):
    def method(self, value):
        return value

    @classmethod
    def build(cls):
        return cls

    @property
    def size(self):
        return 3


@pytest.fixture
def library():
    return types.SimpleNamespace(Subject=Subject, table={"a": 1})


def wrapped(original):
    return lambda *args, **kwargs: ("ours", original)


@pytest.mark.parametrize(
    ("target", "wrap", "use"),
    [
        ("Subject.method", wrapped, lambda: Subject().method(1)),
        ("Subject.inherited", wrapped, lambda: Subject().inherited()),
        ("Subject.build", lambda original: classmethod(lambda cls: ("ours", cls)), lambda: Subject.build()),
        ("Subject.size", lambda original: property(lambda self: ("ours", original.fget(self))), lambda: Subject().size),
    ],
)
def test_a_patch_is_undone_exactly(library, target, wrap, use):
    registry = PatchRegistry()
    before = dict(vars(Subject))
    plain = use()
    patch = Patch("library", target, wrap, "nothing")
    assert registry.apply(patch, library)
    assert registry.apply(patch, library)
    assert use()[0] == "ours"
    assert registry.applied() == (f"library.{target}",)
    registry.undo_all()
    assert use() == plain
    assert dict(vars(Subject)) == before
    assert registry.applied() == ()


@pytest.mark.parametrize(
    ("target", "needs", "words"),
    [
        ("Subject.gone", (), "not there"),
        ("Gone.method", (), "not there"),
        ("Subject.method", ("max_norm",), "no parameter max_norm"),
    ],
)
def test_a_missing_or_changed_target_becomes_a_problem_not_an_exception(library, target, needs, words):
    registry = PatchRegistry()
    assert not registry.apply(Patch("library", target, wrapped, "clipping", needs), library)
    assert len(registry.problems) == 1
    for part in (f"library.{target}", words, "without it clipping does not work"):
        assert part in registry.problems[0]


def test_an_error_inside_a_wrapper_becomes_a_problem_not_an_exception(library):
    registry = PatchRegistry()
    assert not registry.apply(Patch("library", "Subject.method", lambda original: 1 / 0, "it"), library)
    assert "ZeroDivisionError" in registry.problems[0]
    assert Subject().method(4) == 4


def test_somebody_elses_later_wrapper_survives_our_undo(library):
    registry = PatchRegistry()
    registry.apply(Patch("library", "table", lambda original: {**original, "b": 2}, "it"), library)
    library.table = theirs = {**library.table, "c": 3}
    registry.undo_all()
    assert library.table is theirs
