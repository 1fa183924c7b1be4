"""numba's compiler, its results kept in the user's cache folder: by itself numba keeps them beside
the source, and refuses to compile where it cannot.

numba makes every function ready to run by itself, with those that it calls; a caller takes in the
intermediate code and does the same again, once for each level above. Here (`inlined`) a function
stays intermediate code, and is kept as such."""

import gc
import hashlib
import importlib
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, cached_property, update_wrapper
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
from llvmlite import ir
from numba import types
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.runtime.nrt import rtsys
from numba.cpython import hashing  # noqa: F401  its constants are symbols of compiled code
from numba.extending import intrinsic, typeof_impl
from numba.np import linalg as blas

import eldr_sim
from eldr_sim import numba_memo, shipped
from eldr_sim.cache import NUMBA, closed_to_others, distrusted_files, stamp, warn, writable_folder

_make_result: Any = CompileResult  # by names that its type does not know


class _NoEnvironment:
    """Takes the place of the code's owner, who would look up a variable of the running function."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Do nothing: the function does not run by itself."""


class _Library(JITCodeLibrary):
    """Code that is linked into that of callers and has no address of its own."""

    codegen: ClassVar[Any] = _NoEnvironment

    def _optimize_final_module(self) -> None:
        """Leave the whole to the caller; functions have been simplified by themselves."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        """Return that there is none."""
        return 0

    def serialize_using_object_code(self) -> tuple[str, str, bytes]:
        """Return the intermediate code."""
        data: tuple[str, str, bytes] = self.serialize_using_bitcode()
        return data


class InlinedCompiler(Compiler):
    """numba's compiler, up to the intermediate code."""

    def define_pipelines(self) -> Any:
        """Return the steps of the usual compiler, which fill a library of this module's kind."""
        state = self.state
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()


class RestrictedCompiler(InlinedCompiler):
    """The same for functions with arrays that do not overlap, as C's ``restrict`` says. Loops over
    several of them need no test of that before they run in vector registers."""

    def define_pipelines(self) -> Any:
        """Return the steps of the compiler, which tell LLVM so."""
        self.state.flags.noalias = True
        return super().define_pipelines()


class _Locator(UserProvidedCacheLocator):
    """Where a function is kept: by what its module is called and says, not by where it lies.

    All environments of a machine that hold the same sources compile once."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno
        name = f"{py_func.__module__}-{_digest(py_file).hex()[:8]}"
        self._cache_path = str(Path(_config.CACHE_DIR or _place(), name))

    def get_source_stamp(self) -> bytes:
        """Return what tells a module from others of its name."""
        return _digest(self._py_file)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        """Return the place of a function; None where nothing can be written."""
        return cls(py_func, py_file) if _can_write(_config.CACHE_DIR or _place()) else None


@cache
def _can_write(folder: str) -> bool:
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


@cache
def _digest(path: str) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


class _Loaded(JITCodeLibrary):
    """Code from the cache; its intermediate code is parsed when another function links it."""

    _bitcode: bytes

    def _get_module_for_linking(self) -> Any:
        if self._shared_module is None:
            self._shared_module = llvm.parse_bitcode(self._bitcode)
            self._codegen._engine._load_defined_symbols(self._shared_module)
        return self._shared_module


class _Results(CompileResultCacheImpl):
    _locator_classes = [_Locator, *CompileResultCacheImpl._locator_classes]  # noqa: RUF012

    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Return a function from what the cache has of it."""
        (name, _, data), fndesc, environment, signature, _, lifted, annotation, *rest = payload
        for function in rest[0]:
            function()
        names = (
            fndesc.llvm_func_name,
            fndesc.llvm_cpython_wrapper_name,
            fndesc.llvm_cfunc_wrapper_name,
        )
        library = self._library(target_context.codegen(), name, data, names)
        for referenced in rest[1]:
            library.codegen.set_env(referenced.env_name, referenced)
        return _make_result(
            typing_context=target_context.typing_context,
            target_context=target_context,
            entry_point=target_context.get_executable(library, fndesc, environment),
            typing_error=None,
            type_annotation=annotation,
            signature=signature,
            objectmode=False,
            lifted=lifted,
            fndesc=fndesc,
            library=library,
            call_helper=None,
            environment=environment,
            metadata=None,
            reload_init=rest[0],
            referenced_envs=rest[1],
        )

    def _library(self, codegen: Any, name: str, data: Any, names: Iterable[str]) -> JITCodeLibrary:
        """Return the code; ``names``: of functions that others may look up, if it has them."""
        library = _Loaded(codegen, name)
        library.enable_object_caching()
        code, library._bitcode = data
        library._set_compiled_object(code)
        library._finalize_final_module()
        codegen._engine._defined_symbols |= {
            each for each in names if each.encode() + b"\0" in code
        }
        return library


class _Inlined(_Results):
    def _library(self, codegen: Any, name: str, data: Any, names: Iterable[str]) -> JITCodeLibrary:
        library = _Library(codegen, name)
        library._final_module = llvm.parse_bitcode(data)
        library._finalize_final_module()
        return library


class _Cache(FunctionCache):
    """Keeps compiled functions in the cache folder, as long as it has room for them."""

    _impl_class = _Results

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return a function from the cache, None where it has not got it.

        numba first looks for the types and operators of all its modules, which only compiling
        needs: here the memory of arrays and the addresses of its helpers are made ready."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a function; after a warning, the work goes on where that fails."""
        try:
            with closed_to_others():
                super().save_overload(sig, data)
        except OSError as error:
            warn(f"{error.filename or self.cache_path}: {error.strerror}")


class InlinedCache(_Cache):
    """Keeps functions that are inlined there, as intermediate code."""

    _impl_class = _Inlined


def _skip_blas() -> None:
    """Import numba's array functions without the BLAS of SciPy, a fifth of a second of each run.
    Who compiles a product of matrices gets it then: numba looks once more."""
    asked, blas.ensure_blas = blas.ensure_blas, lambda: None
    try:
        importlib.import_module("numba.np.arraymath")
    finally:
        blas.ensure_blas = asked


_skip_blas()
numba_memo.install()
shipped.use_level()  # before the first function: that makes numba's code generator
_config: Any = numba.config  # its settings are made when it is imported, which mypy cannot see


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
    if inlined:
        only_code = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
        kind = RestrictedCompiler if restrict else InlinedCompiler
        options |= only_code | {"pipeline_class": kind}

    def decorate(function: Callable[..., Any]) -> Compiled:
        return Compiled(function, InlinedCache if inlined else _Cache, options)

    return decorate


class Compiled:
    """A function that numba compiles. Its dispatcher, which is slow to make, is made when the
    function is called or compiled: a run needs few of some four hundred."""

    def __init__(
        self, function: Callable[..., Any], cache: type[_Cache], options: dict[str, Any]
    ) -> None:
        update_wrapper(self, function)
        self.py_func, self._kept_in, self._options = function, cache, options

    @cached_property
    def dispatcher(self) -> Any:
        """numba's function."""
        dispatcher = numba.njit(**self._options)(self.py_func)
        if _config.CACHE_DIR or _place():
            dispatcher._cache = self._kept_in(self.py_func)
        return dispatcher

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


@typeof_impl.register(Compiled)
def _typeof(function: Compiled, _context: Any) -> Any:
    return function.dispatcher._numba_type_


def is_cold() -> bool:
    """Whether the simulator's functions have still to be compiled on this machine."""
    place = _config.CACHE_DIR or _place()
    return not place or next(Path(place).glob("*/loop.advance*.nbi"), None) is None


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
    compilers = (Path(__file__).with_name(f"{name}.py") for name in ("jit", "references"))
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


class _NoCollector(event.Listener):
    """Stops Python's collector of cycles while numba compiles: it finds next to nothing there."""

    def __init__(self) -> None:
        self._within, self._was_on = 0, False

    def on_start(self, _event: Any) -> None:
        """Stop it when the first of several functions that call each other begins."""
        if self._within == 0:
            self._was_on = gc.isenabled()
            gc.disable()
        self._within += 1

    def on_end(self, _event: Any) -> None:
        """Let it go on after the last one."""
        self._within -= 1
        if self._within == 0 and self._was_on:
            gc.enable()


event.register("numba:compile", _NoCollector())


@intrinsic
def _popcount(_typing: Any, _word: Any) -> Any:
    """Count the set bits of a uint64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def _lowest(_typing: Any, _word: Any) -> Any:
    """Return the place of the lowest set bit of a uint64 that is not zero, int64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def _prefetch(_typing: Any, row: Any, index: Any) -> Any:
    """Fetch the cache line of a word of a row, which is read soon."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        start = context.make_array(signature.args[0])(context, builder, args[0]).data
        line = builder.bitcast(builder.gep(start, [args[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        fetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        builder.call(fetch, [line, *(ir.Constant(number, value) for value in (0, 2, 1))])
        return context.get_dummy_value()

    return types.void(row, index), codegen


#: As mypy cannot see them: without the first argument.
popcount: Any = _popcount
lowest: Any = _lowest
prefetch: Any = _prefetch
