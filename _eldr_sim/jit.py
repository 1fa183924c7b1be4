"""Compiled functions. numba compiles them when they are first called, and their code is kept in the
user's cache folder (`compiler`). What runs call most is an `Entry`: machine code in an object file,
which LLVM loads by itself. A run that needs nothing else does not import numba."""

import ctypes
import hashlib
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, cached_property, update_wrapper
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
import numpy as np

import eldr_sim
from eldr_sim import shipped
from eldr_sim.cache import NUMBA, closed_to_others, distrusted_files, stamp, warn, writable_folder
from eldr_sim.errors import InputError
from eldr_sim.outputs import CACHE, whole_file

if TYPE_CHECKING:
    from eldr_sim.references import Layout, Reference


def njit(
    *, inlined: bool = False, restrict: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with ``numba.njit`` and keep the machine code on disk.

    Args:
        inlined: only compiled code calls the function, which takes less time to compile.
        restrict: what the function writes overlaps no other array.
        options: options of ``numba.njit`` except ``cache``.

    Returns:
        The decorator. Machine code is kept in ``NUMBA_CACHE_DIR``, or else in `eldr_sim.cache`.
    """

    def decorate(function: Callable[..., Any]) -> Compiled:
        return Compiled(function, inlined, restrict, options)

    return decorate


class Compiled:
    """A function that numba compiles. Its dispatcher, which is slow to make, is made when the
    function is called or compiled: a run needs few of some four hundred."""

    def __init__(
        self, function: Callable[..., Any], inlined: bool, restrict: bool, options: dict[str, Any]
    ) -> None:
        update_wrapper(self, function)
        self.py_func, self.options = function, options
        self.inlined, self.restrict = inlined, restrict

    @cached_property
    def dispatcher(self) -> Any:
        """numba's function."""
        from eldr_sim.compiler import make_dispatcher

        return make_dispatcher(self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function, compiled."""
        return self.dispatcher(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of numba's function."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dispatcher, name)

    def __reduce__(self) -> str:
        """Pickle by name, as functions are."""
        return self.__qualname__  # type: ignore[no-any-return]


class Intrinsic:
    """Stands for a function of `intrinsics` in the text of compiled functions."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def _numba_type_(self) -> Any:
        from eldr_sim.compiler import type_of

        return type_of(self)


popcount: Any = Intrinsic("popcount")
lowest: Any = Intrinsic("lowest")
prefetch: Any = Intrinsic("prefetch")


_NUMBERS: dict[Any, Any] = {
    **dict.fromkeys((int, np.int64), ("int64", ctypes.c_int64)),
    float: ("float64", ctypes.c_double),
}


class Entry:
    """Decorates a function of a `Reference` and numbers, which is compiled and called by address.
    The annotations of the numbers and the result are int or float."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self.py_func = function
        _, *kinds = function.__annotations__.values()
        self.numbers, of = zip(*(_NUMBERS[kind] for kind in kinds), strict=True)
        self._result = of[-1]
        pointer = ctypes.c_void_p
        self._kind = ctypes.PYFUNCTYPE(ctypes.c_int32, pointer, pointer, pointer, *of[:-1])
        self._known: dict[Layout, tuple[int, Any]] = {}

    def __call__(self, reference: "Reference", *numbers: float) -> Any:
        """Call the function, compiled; raises what it raises."""
        result, failure = self._result(), ctypes.POINTER(_Failure)()
        at = ctypes.byref(result), ctypes.byref(failure)
        if self._compiled(reference)[1](*at, reference.address, *numbers):
            raised, arguments, *_ = pickle.loads(
                ctypes.string_at(failure.contents.data, failure.contents.size)
            )
            raise raised(*arguments or ())
        return result.value

    def address(self, reference: "Reference") -> int:
        """Return where the function is, for such references."""
        return self._compiled(reference)[0]

    def _compiled(self, reference: "Reference") -> tuple[int, Any]:
        layout = reference.layout
        if layout not in self._known:
            with _lock:
                at = self._known[layout][0] if layout in self._known else self._kept(reference)
                self._known[layout] = at, self._kind(at)
        return self._known[layout]

    def _kept(self, reference: "Reference") -> int:
        """Load the function from its file, or compile it and keep it there."""
        key = repr((_machine(), self.numbers, reference.layout.text)).encode()
        folder = module_folder(self.py_func, self.py_func.__code__.co_filename)
        path = Path(folder, f"{self.py_func.__name__}-{hashlib.sha256(key).hexdigest()[:12]}.o")
        kept = b""
        if place():
            with suppress(OSError):
                kept = path.read_bytes()
        checksum, text = kept[:_DIGEST], kept[_DIGEST:]
        at = _load(text) if checksum == hashlib.sha256(text).digest() else 0
        if not at:
            from eldr_sim.compiler import object_of

            text = object_of(self, reference.type)
            if place() and can_write(place()):
                _keep(path, text)
            at = _load(text)
        assert at, f"{path.name} needs what this process lacks"
        return at


_lock = threading.RLock()
_DIGEST = hashlib.sha256().digest_size


class _Failure(ctypes.Structure):
    """What numba's code leaves of an exception: pickled, its class, arguments and place."""

    _fields_ = [("data", ctypes.c_void_p), ("size", ctypes.c_int32)]


def _keep(path: Path, text: bytes) -> None:
    """Keep the names of a function and those that it needs, and its object file."""
    try:
        with closed_to_others(), whole_file(path, CACHE) as temporary:
            temporary.write_bytes(hashlib.sha256(text).digest() + text)
    except (InputError, OSError) as error:
        warn(error.problem if isinstance(error, InputError) else f"{path}: {error.strerror}")


@cache
def _machine() -> tuple[str, ...]:
    """Return what compiled code depends on besides its sources: numba and what it is told, and the
    processor."""
    told = {name: text for name, text in os.environ.items() if name.startswith("NUMBA_")}
    for name in ("NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS"):
        told.pop(name, None)
    level = shipped.level()
    name = told.pop("NUMBA_CPU_NAME", None) or level or llvm.get_host_cpu_name()
    features = told.pop("NUMBA_CPU_FEATURES", shipped.LEVELS.get(level or ""))
    if features is None:
        features = llvm.get_host_cpu_features().flatten()
    return version("numba"), llvm.get_process_triple(), name, features, str(sorted(told.items()))


@cache
def _engine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


def _load(text: bytes) -> int:
    """Load an object file below a line of the names of its function and of those that it needs.
    Return where the function is; 0 where this process lacks one of these, such as numba's counts of
    references, which a function calls that was compiled for Python first."""
    engine = _engine()  # it makes the symbols of this process known
    line, _, code = text.partition(b"\n")
    name, *needs = line.decode().split()
    for ours in ("frexp", "ldexp"):  # numba's are C's
        at, known = (llvm.address_of_symbol(each) for each in (ours, f"numba_{ours}"))
        if at and not known:
            llvm.add_symbol(f"numba_{ours}", at)
    unknown = [need for need in needs if llvm.address_of_symbol(need) is None]
    if unknown:
        import eldr_sim.compiler  # noqa: F401  numba makes its own known
    if any(llvm.address_of_symbol(need) is None for need in unknown):
        return 0
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(name))


def is_cold() -> bool:
    """Whether the simulator's functions have still to be compiled on this machine."""
    return not place() or next(Path(place()).glob("*.plane.loop-*/advance-*.o"), None) is None


#: Folders and modules whose compiled functions call each other, or whose constants they contain.
#: numba looks whether a function's own file has changed, not at those of the functions it calls.
_FOLDERS = tuple(f"simulator.plane{inner}" for inner in ("", ".kv", ".scheduler", ".steps"))
_MODULES = (
    *("kernel_profiles.kernels.all_to_all", "kernel_profiles.kernels.all_to_all_cost"),
    *("kernel_profiles.steps.cost_tables", "kernel_profiles.steps.step_cost"),
    *("kernel_profiles.steps.weight_streaming", "simulator.setup.replay"),
    *("policies.replicas.base", "policies.replicas.metro", "policies.replicas.weighted"),
    *("policies.compiled", "policies.eldr.online", "policies.eldr.unit"),
    *("policies.routing.marginal_cost", "policies.routing.unions"),
    *(
        "traces.requests.caches.arc",
        "traces.requests.caches.linked",
        "traces.requests.caches.session_lists",
    ),
)
_COMPILERS = "compiler", "intrinsics", "jit", "reference_types", "references"


def linked() -> tuple[str, ...]:
    """Return the modules that compiled functions come from which others call."""
    found = [*_MODULES]
    for folder in _FOLDERS:
        package = find_spec(f"eldr_sim.{folder}")
        for place in (package and package.submodule_search_locations) or ():
            found += [f"{folder}.{path.stem}" for path in sorted(Path(place).glob("*.py"))]
    return tuple(found)


@cache
def _place() -> str:
    """Return the folder of these sources' functions; empty where nothing can be kept."""
    compilers = (Path(__file__).with_name(f"{name}.py") for name in _COMPILERS)
    sources = b"".join(map(Path.read_bytes, compilers)) + stamp(linked()).encode()
    key, level = hashlib.sha256(sources).hexdigest()[:8], shipped.level()
    if level is not None:
        key += f"-{level}"
    place = writable_folder(f"{NUMBA}/{eldr_sim.__version__}-{key}")
    if place is None:
        return ""
    if reason := distrusted_files(place):
        warn(reason)
        return ""
    if level is not None and not any(place.iterdir()):
        shipped.unpack(level, place)
    return str(place)


def place() -> str:
    """Return the folder of compiled code; empty where nothing can be kept."""
    return os.environ.get("NUMBA_CACHE_DIR") or _place()


def module_folder(function: Any, path: str) -> str:
    """Return the folder of a function's module: by what it is called and says, not by where it
    lies. All environments of a machine that hold the same sources compile once."""
    return str(Path(place(), f"{function.__module__}-{source_digest(path).hex()[:8]}"))


@cache
def can_write(folder: str) -> bool:
    """Return whether a folder can be made and written to."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def source_digest(path: str) -> bytes:
    """Return what tells a module from others of its name."""
    return hashlib.sha256(Path(path).read_bytes()).digest()
