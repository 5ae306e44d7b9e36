"""Checks a task's options, by its signature on loading and by its source before any start.

A task is a function, and its keyword arguments are the options of the table ``[task]``. Importing it may take an array
library and seconds, in each of several processes at once; its source shows the names of its options, and is read
in milliseconds.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Final

from broker.base.errors import ConfigError
from broker.base.settings import nearest

_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
#: Calls that can give a package modules which are not among its files.
_MODULES_FROM_ELSEWHERE: Final = re.compile(rb"__path__|sys\.modules|meta_path|setattr\(|exec\(")
#: Calls that can give a module names which its source does not show.
_NAMES_FROM_ELSEWHERE: Final = re.compile(rb"import\s*\*|__getattr__|globals\(|setattr\(|exec\(")
_NAMED: Final = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def module_and_function(path: str, *, field: str = "task") -> tuple[str, str]:
    """Returns the two halves of ``package.module:function``.

    Args:
        path: The text to split.
        field: The setting that it stands in, for the error.

    Raises:
        ConfigError: It does not read so.
    """
    module_name, colon, function_name = path.partition(":")
    if not (module_name and colon and function_name):
        example = "islands.language:task" if field == "task" else "mymodel:accuracy"
        raise ConfigError(field, path, f"must read package.module:function, such as {example}")
    return module_name, function_name


def no_module(path: str, missing: str, *, field: str = "task") -> ConfigError:
    """Returns the error for a function whose module is not found."""
    cure = f"there is no module {missing}: check the name, and that PYTHONPATH holds the folder it is in"
    return ConfigError(field, path, cure)


def check_options(path: str, signature: Signature, options: Mapping[str, Any]) -> None:
    """Checks options against the signature of their function.

    Args:
        path: ``package.module:function``, for the error.
        signature: The signature of that function.
        options: By name.

    Raises:
        ConfigError: If an option is unknown, with the nearest that is known; or if one is missing.
    """
    by_name = {name: each for name, each in signature.parameters.items() if each.kind in _NAMED}
    takes_any = any(each.kind is Parameter.VAR_KEYWORD for each in signature.parameters.values())
    for name, value in options.items():
        if name not in by_name and not takes_any:
            cure = nearest(name, by_name) if by_name else "it has none"
            raise ConfigError(f"task.{name}", value, f"{path} has no such option; {cure}")
    for name, each in by_name.items():
        if each.default is Parameter.empty and name not in options:
            raise ConfigError(f"task.{name}", None, f"{path} needs this option; it has: {', '.join(by_name)}")


def signature_in_source(
    path: str, *, search: list[str] | None = None, field: str = "task", hops: int = 1
) -> Signature | None:
    """Returns the signature of ``package.module:function`` from its source; imports nothing.

    The defaults in it say only that there is one.

    Args:
        path: The function, as ``package.module:function``.
        search: Folders to look in; ``sys.path`` when they are not given.
        field: The setting that it stands in, for the error.
        hops: Times that ``from MODULE import FUNCTION`` is followed.

    Returns:
        None if the source does not tell: the module is not Python source, or the function is not defined exactly once,
        plainly and undecorated, at the top of it or of the module that it is imported from. Loading it will tell.

    Raises:
        ConfigError: The path names no function; there is no such module, as far as files and import hooks tell; or its
            source does not mention the function.
    """
    function_name = module_and_function(path, field=field)[1]
    spec = _find_module(path, search, field)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        source = Path(spec.origin).read_bytes()
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError):
        return None
    if function_name.encode() not in source and not _NAMES_FROM_ELSEWHERE.search(source):
        known = [each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        likely = f"; {nearest(function_name, known)}" if known else ""
        raise ConfigError(field, path, f"{spec.origin} does not mention {function_name}{likely}")
    bindings = [each for each in tree.body if _names_bound_by(each) & {function_name, "*"}]
    match bindings:
        case [ast.FunctionDef(decorator_list=[]) as function]:
            return _signature(function.args)
        case [ast.ImportFrom(module=str(other), level=0, names=[ast.alias(name=name)])] if hops:
            try:
                return signature_in_source(f"{other}:{name}", search=search, hops=hops - 1)
            except ConfigError:  # the import will say so
                return None
        case _:
            return None


def _find_module(path: str, search: list[str] | None, field: str) -> ModuleSpec | None:
    """Finds the module of ``package.module:function`` without running its packages.

    Returns:
        None if only an import can tell whether there is one.

    Raises:
        ConfigError: There is none.
    """
    spec: ModuleSpec | None = None
    folders, so_far = search or sys.path, ""
    for part in module_and_function(path, field=field)[0].split("."):
        package, so_far = spec, f"{so_far}.{part}" if so_far else part
        if package is not None and package.submodule_search_locations is None:
            return None  # it is no package: what it calls its modules, only an import can tell
        try:
            spec = PathFinder.find_spec(so_far, folders)
            if spec is None and package is None:
                spec = importlib.util.find_spec(so_far)  # built in, or known to an import hook
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        except (KeyError, ImportError, ValueError):  # a namespace package in another; a module without a spec
            return None
        if spec is None:
            if package is not None and _has_modules_from_elsewhere(package):
                return None
            raise no_module(path, so_far, field=field)
    return spec


def _has_modules_from_elsewhere(package: ModuleSpec) -> bool:
    if package.origin is None or not package.has_location:
        return False
    try:
        return _MODULES_FROM_ELSEWHERE.search(Path(package.origin).read_bytes()) is not None
    except OSError:
        return True


def _names_bound_by(statement: ast.stmt) -> set[str]:
    """Returns the names that a module's top-level statement may bind; ``*`` means any name."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}  # what its body binds is its own
    names: set[str] = set()
    for node in ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.alias(name=name, asname=asname):
                names.add(asname or name)
    return names


def _signature(args: ast.arguments) -> Signature:
    """Returns the signature of these arguments; defaults are not evaluated."""
    args.defaults = [ast.Constant(None) for _ in args.defaults]
    args.kw_defaults = [each and ast.Constant(None) for each in args.kw_defaults]
    empty = ast.fix_missing_locations(ast.Expression(ast.Lambda(args, ast.Constant(None))))
    return inspect.signature(eval(compile(empty, "<task>", "eval")))
