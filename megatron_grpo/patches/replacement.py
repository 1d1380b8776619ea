"""`Replacement`: a name of another package that a run replaces, and the check that the name is as we know it.

A check reads the installed package's source file and imports nothing: it takes milliseconds, and so does that of a
version that is not installed (``root``).
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.utils.errors import GrpoError

ALWAYS = "always"


@dataclass(frozen=True)
class Replacement:
    """A module's or a class's attribute, or a method of an object, in whose place this project puts its own.

    ``target``: "module:name" or "module:Class.name". ``parameters``: the names of a function's parameters in the source
    of its package; None: no function, or not there in Python. ``needed``: "always", or what needs the replacement; it
    is then checked where it is installed. ``scope``: "install" (from the set-up on), "context" (within a call), or
    "object" (the method of one object). ``until``: what makes the replacement needless. ``by``: the file that has what
    takes its place. ``proof``: a test that fails without it, or the figure that it buys. ``optional``: the package
    binds the name only where it can import something else.
    """

    target: str
    parameters: str | None
    why: str
    by: str
    proof: str
    scope: str = "install"
    needed: str = ALWAYS
    until: str = "not known"
    link: str = ""
    optional: bool = False

    @property
    def name(self) -> str:
        """The target as one writes it."""
        return self.target.replace(":", ".")

    @property
    def package(self) -> str:
        """The package of the target, as pip names it."""
        top = self.target.partition(":")[0].partition(".")[0]
        return "megatron-core" if top == "megatron" else top

    def check(self, root: Path | None = None) -> None:
        """Raise GrpoError if the target is missing, or has other parameters than ours.

        ``root``: directory of an unpacked wheel [that of the installed package].
        """
        try:
            found = _found(self.target, root)
        except LookupError:
            raise self._error("which is missing there", root) from None
        if self.parameters is not None and found != self.parameters:
            raise self._error(f"which has the parameters ({found}) there, and not ({self.parameters})", root)

    def install(self, value: Any) -> None:
        """Put ``value`` in the place of the target, for the rest of the process."""
        setattr(*self._place(), value)

    @contextlib.contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Context in which ``value`` is in the place of the target."""
        owner, name = self._place()
        before = inspect.getattr_static(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    def install_on(self, instance: Any, function: Callable) -> Callable:
        """Put ``function`` in the place of the method of one object; return the object's own method."""
        self.check()
        name = self.target.rpartition(".")[2]
        own = getattr(instance, name, None)
        if own is None:
            raise self._error(f"which an object of {type(instance).__name__} lacks")
        setattr(instance, name, function)
        return own

    def install_class(self, instance: Any, subclass: type) -> None:
        """Make an object one of a ``subclass`` of its class, which overrides the method."""
        self.check()
        instance.__class__ = subclass

    @contextlib.contextmanager
    def replaced_on(self, instance: Any, function: Callable) -> Iterator[None]:
        """Context in which ``function`` is in the place of the method of one object."""
        self.install_on(instance, function)
        try:
            yield
        finally:
            delattr(instance, self.target.rpartition(".")[2])

    def original(self) -> Any:
        """Return what the target is now."""
        return getattr(*self._place())

    def _place(self) -> tuple[Any, str]:
        """Return the module or class that has the target, and its name there."""
        if self.package != "torch":  # most of torch's names come from C++
            self.check()
        module, _, path = self.target.partition(":")
        *classes, name = path.split(".")
        try:
            owner = functools.reduce(getattr, classes, importlib.import_module(module))
            if not self.optional:
                getattr(owner, name)
        except (ImportError, AttributeError) as error:
            raise self._error(f"which is missing there ({error})") from error
        return owner, name

    def _error(self, problem: str, root: Path | None = None) -> GrpoError:
        package = self.package
        which = f"in {root}" if root else _version(package)
        return GrpoError(
            f"{package} {which}: this project replaces {self.name}, {problem}. Reason for the replacement: {self.why} "
            f"Install the version of {package} that requirements*.txt names, or mend the entry in "
            f"megatron_grpo/patches and {self.by}"
        )


@dataclass(frozen=True)
class Sources:
    """Source files of a package of which this project repeats parts, so that it depends on every line of them.

    ``folder``: the package, and the folder in it that has all ``files``. ``digests``: by version, the digest of the
    files with which ``proof`` compared ours. ``why``: what the repetition is for. ``by``: the file that repeats parts.
    """

    folder: str
    files: str
    digests: dict[str, str]
    why: str
    by: str
    proof: str

    def digest(self, root: Path | None = None) -> str:
        """Return a digest of the files, 16 hexadecimal digits; "" if one is missing.

        ``root``: directory of an unpacked wheel [that of the installed package].
        """
        package, *inside = self.folder.split("/")
        if root is None:
            spec = importlib.util.find_spec(package)
            folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        else:
            folders = [root / package]
        try:
            contents = [folders[0].joinpath(*inside, file).read_bytes() for file in self.files.split()]
        except (IndexError, OSError):
            return ""
        return hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()[:16]

    def known(self, root: Path | None = None) -> bool:
        """Return whether the files are those of a version that ``proof`` compared."""
        return self.digest(root) in self.digests.values()


def check_all(entries: Iterable[Replacement], root: Path | None = None) -> None:
    """Raise GrpoError if a name is not as we know it that every run replaces (`ALWAYS`)."""
    for entry in entries:
        if entry.needed == ALWAYS:
            entry.check(root)


def entries_of(module: dict[str, Any]) -> list[Replacement]:
    """Return the entries of a module with these ``globals()``."""
    return [value for value in module.values() if isinstance(value, Replacement)]


def _version(package: str) -> str:
    for name in package, f"{package}-cpu":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "(version not known)"


@functools.cache
def _bindings(module: str, root: Path | None) -> dict[str, Any]:
    """Return what a module's source binds; LookupError if there is no such module.

    A function's name has its parameters, a class's name the bindings of its body, an imported name its target, any
    other name None.
    """
    package, *path = module.split(".")
    if root is None:
        spec = importlib.util.find_spec(package)
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    else:
        folders = [root / package]
    for folder in folders:
        file = folder.joinpath(*path)
        for source in file.with_suffix(".py"), file / "__init__.py":
            if source.exists():
                package = module if source.name == "__init__.py" else module.rpartition(".")[0]
                return _of_body(ast.parse(source.read_text()).body, package)
    raise LookupError(module)


class _Imported(str):
    """The target from which a module imports a name."""


def _of_body(body: list[ast.stmt], package: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def bind(names: Iterable[str]) -> None:
        for name in names:
            found.setdefault(name, None)  # a function stays one, whatever an except branch puts in its place

    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = statement.args
            parameters = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
            found[statement.name] = ", ".join(parameter.arg for parameter in parameters if parameter)
        elif isinstance(statement, ast.ClassDef):
            found[statement.name] = _of_body(statement.body, package)
        elif isinstance(statement, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - statement.level + 1] if statement.level else []
            module = ".".join([*above, *filter(None, [statement.module])])
            for alias in statement.names:
                found.setdefault(alias.asname or alias.name, _Imported(f"{module}:{alias.name}"))
        elif isinstance(statement, ast.Import):
            bind((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            bind(node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        else:  # if, try, with
            blocks = [getattr(statement, name, []) for name in ("body", "orelse", "finalbody")]
            blocks += [handler.body for handler in getattr(statement, "handlers", [])]
            for block in blocks:
                for name, value in _of_body(block, package).items():
                    found[name] = found.get(name) if value is None else value
    return found


def _found(target: str, root: Path | None) -> Any:
    """Return the parameters of the function ``target``, or None; LookupError if it is missing."""
    module, _, path = target.partition(":")
    found: Any = _bindings(module, root)
    for name in path.split("."):
        if not isinstance(found, dict):
            raise LookupError(target)
        found = found[name]
    if isinstance(found, _Imported):
        try:
            return _found(found, root)
        except LookupError:  # a module, or of a package that is not installed
            return None
    return None if isinstance(found, dict) else found
