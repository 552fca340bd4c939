"""From a TOML file, then `KVBRIDGE_*` variables, then flags to the settings of a node."""

from __future__ import annotations

import ast
import inspect
import os
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbridge.config.addresses import ENVIRONMENT_PREFIX
from kvbridge.config.errors import ConfigurationError
from kvbridge.config.settings import BridgeConfig


def setting_meanings() -> dict[str, str]:
    """Return what each setting means, as it is written below its declaration."""
    [declaration] = ast.parse(inspect.getsource(BridgeConfig)).body
    assert isinstance(declaration, ast.ClassDef)
    meanings = {}
    for statement, after in pairwise(declaration.body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr)
            meanings[statement.target.id] = str(ast.literal_eval(after.value))
    return meanings


def load_config(
    path: str | None = None,
    *,
    environment: Mapping[str, str] = os.environ,
    overrides: Mapping[str, Any] | None = None,
) -> BridgeConfig:
    """Join the TOML file at `path`, `KVBRIDGE_*` variables and `overrides`; later ones win.

    Raises:
        ConfigurationError: the file cannot be read, or a setting is unknown, of the wrong type or out of range.
    """
    settings = {**_from_file(path), **_from_environment(environment), **(overrides or {})}
    return replace(BridgeConfig(), **settings)


def _from_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return {name: _typed(name, value, source=path) for name, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {ENVIRONMENT_PREFIX + setting.name.upper(): setting.name for setting in fields(BridgeConfig)}
    given = {variable: name for variable, name in names.items() if variable in environment}
    return {name: _parsed(name, environment[variable], source=variable) for variable, name in given.items()}


def _typed(name: str, value: object, *, source: str) -> object:
    wanted = _types().get(name)
    if wanted is None:
        raise ConfigurationError(f"{source}: there is no setting {name!r}")
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not wanted:
        raise ConfigurationError(f"{source}: {name} must be {wanted.__name__}, got {type(value).__name__}")
    return value


def _parsed(name: str, text: str, *, source: str) -> object:
    wanted = _types()[name]
    if wanted is bool:
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in words:
            raise ConfigurationError(f"{source}: must be one of {', '.join(words)}, got {text!r}")
        return words[text.lower()]
    try:
        return wanted(text)
    except ValueError as error:
        raise ConfigurationError(f"{source}: must be {wanted.__name__}, got {text!r}") from error


def _types() -> dict[str, type]:
    named: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str}
    return {setting.name: named[str(setting.type)] for setting in fields(BridgeConfig)}
