"""A task's options, told by its source: what loading the task would find, before anything is imported."""

import inspect

import pytest

from broker.base.errors import ConfigError
from islands.tasks import language
from islands.tasks.options import check_options, signature_in_source


@pytest.fixture
def read(tmp_path):
    """Returns what the source of a module says of its function ``task``, and fails if the module is imported."""
    (tmp_path / "package_of_a_test").mkdir()
    (tmp_path / "package_of_a_test" / "__init__.py").write_text("raise RuntimeError('nobody imports this')\n")

    def read(source):
        (tmp_path / "package_of_a_test" / "sub.py").write_text(source)
        return signature_in_source("package_of_a_test.sub:task", search=[str(tmp_path)])

    return read


def named(signature):
    """Returns (name, kind, whether it has a default) of each parameter."""
    return [(p.name, p.kind, p.default is not p.empty) for p in signature.parameters.values()]


def test_the_source_of_the_default_task_says_what_its_signature_says_also_where_it_is_imported():
    for path in ("islands.tasks.language:task", "islands.language:task"):
        assert named(signature_in_source(path)) == named(inspect.signature(language.task))


def test_a_module_that_imports_the_function_from_itself_says_nothing(read):
    assert read("from package_of_a_test.sub import task\n") is None


@pytest.mark.parametrize(
    "parameters", ["", "a, /, b, c=2, *, d, e=5", "a, b=1, /, c=2", "*args, size", "*, size=1, **others"]
)
def test_every_kind_of_parameter_is_read_as_python_reads_it(read, parameters):
    scope = {}
    exec(f"def task({parameters}): ...", scope)
    assert named(read(f"def task({parameters}):\n    return 1\n")) == named(inspect.signature(scope["task"]))


def test_neither_defaults_nor_annotations_are_evaluated(read):
    (size,) = read("def task(size: print('imported') = 1 / 0): ...\n").parameters.values()
    assert (size.default, size.annotation) == (None, size.empty)


@pytest.mark.parametrize(
    "source",
    [
        "task = make()\n",
        "from elsewhere import task\n",
        "from elsewhere import *\ndef task(size): ...\n",
        "@wrapped\ndef task(size): ...\n",
        "def task(size): ...\ntask = wrapped(task)\n",
        "def task(size): ...\ndef task(width): ...\n",
        "if FAST:\n    def task(size): ...\nelse:\n    def task(width): ...\n",
        "class task: ...\n",
        "def task(size:\n",
    ],
)
def test_a_source_that_does_not_tell_is_left_to_the_loading(read, source):
    assert read(source) is None


@pytest.mark.parametrize("path", [":task", "islands.language", "islands.language:", ""])
def test_what_names_no_function_is_refused(path):
    with pytest.raises(ConfigError, match=r"must read package\.module:function"):
        signature_in_source(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needed": 1, "sise": 2}, r"task.sise = 2"),
        ({"needed": 1, "colour": 2}, "task.colour = 2"),
        ({"size": 2}, "task.needed = None"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_with_the_cure(read, options, message):
    with pytest.raises(ConfigError, match=message):
        check_options("a:b", read("def task(*, needed, size=1): ...\n"), options)


@pytest.mark.parametrize(
    "source",
    [
        "from elsewhere import  *\n",
        "def _make(name):\n    pass\nglobals()[f'ta{1}sk'] = _make\n",
        "def __getattr__(name):\n    pass\n",
    ],
)
def test_a_function_that_its_source_may_make_is_let_pass(tmp_path, source):
    (tmp_path / "of_a_test.py").write_text(source)
    assert signature_in_source("of_a_test:task", search=[str(tmp_path)]) is None


@pytest.mark.parametrize(
    ("source", "told"),
    [("if True:\n    def tsk():\n        pass\n", "did you mean tsk"), ("", r"does not mention task$")],
)
def test_a_function_that_its_source_does_not_mention_is_refused(tmp_path, source, told):
    (tmp_path / "of_a_test.py").write_text(source)
    with pytest.raises(ConfigError, match=told):
        signature_in_source("of_a_test:task", search=[str(tmp_path)])


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("no_such_module", "no_such_module"),
        ("no_such.module", "no_such"),
        ("plain.no_such", "plain.no_such"),
        ("plain.inner.no_such", "plain.inner.no_such"),
        ("bare.no_such", "bare.no_such"),
    ],
)
def test_a_module_that_is_not_there_is_named(packages, module, missing):
    with pytest.raises(ConfigError, match=f"there is no module {missing}: check the name"):
        signature_in_source(f"{module}:task", search=packages)


@pytest.mark.parametrize(
    "module",
    ["plain", "plain.inner", "plain.inner.one", "bare.one", "grows.no_such", "math", "os.path", "bare.deep.no_such"],
)
def test_a_module_that_is_there_or_may_be_is_let_pass(packages, module):
    signature_in_source(f"{module}:task", search=packages)


@pytest.fixture
def packages(tmp_path):
    """Folders with packages: plain ones, one without ``__init__``, and one that finds its modules elsewhere."""
    for folder in ("plain/inner", "bare/deep", "grows"):
        (tmp_path / folder).mkdir(parents=True)
    for package in ("plain", "plain/inner"):
        (tmp_path / package / "__init__.py").write_text("def task(): ...\n")
    for module in ("plain/inner/one.py", "bare/one.py"):
        (tmp_path / module).write_text("def task(): ...\n")
    (tmp_path / "grows" / "__init__.py").write_text("__path__.append('elsewhere')\n")
    return [str(tmp_path)]
