"""Code of a user's own that a job names as "module:name". No torch."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.errors import JobError, nearest_names


def load_named(spec: str, where: str, kinds: Callable[[Any], bool] = inspect.isfunction) -> Any:
    """What `spec` names; modules are looked for in the working folder too.

    Args:
        spec: "module:name", where the name may have dots.
        where: key of the job, for errors.
        kinds: which members of the module to suggest for a name that it lacks.

    Raises:
        JobError: `job/bad-value` unless the module can be imported and has the name.
    """
    module_name, colon, name = spec.partition(":")
    if not colon or not module_name or not name:
        legal = ["module:name"]
        raise JobError("job/bad-value", where, spec, "names nothing in a module", legal=legal)
    module = _imported(spec, where, module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            rule = f"{getattr(module, '__file__', None) or module_name} has no {name!r}"
            names = [each for each, value in vars(module).items() if kinds(value)]
            legal = [f"{module_name}:{each}" for each in nearest_names(part, names)]
            raise JobError("job/bad-value", where, spec, rule, legal=legal)
        found = getattr(found, part)
    return found


def _imported(spec: str, where: str, name: str) -> Any:
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # behind all else: nothing that is installed gets another meaning
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            rule = f"there is no module {name!r} in {folder} or among the installed packages"
            here = nearest_names(name, [path.stem for path in Path(folder).glob("*.py")])
            legal = [each for each in here if each != name]
            raise JobError("job/bad-value", where, spec, rule, legal=legal) from error
        rule = f"its module needs {error.name!r}, which is not installed"
        raise JobError("job/bad-value", where, spec, rule) from error
    except Exception as error:  # whatever a foreign module raises while it is read
        rule = f"its module cannot be imported ({type(error).__name__}: {error})"
        raise JobError("job/bad-value", where, spec, rule) from error
