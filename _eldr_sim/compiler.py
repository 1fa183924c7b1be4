"""numba's compiler, its results kept in the user's cache folder: by itself numba keeps them beside
the source, and refuses to compile where it cannot.

numba makes every function ready to run by itself, with those that it calls; a caller takes in the
intermediate code and does the same again, once for each level above. Here (`inlined`) a function
stays intermediate code, and is kept as such. An entry (`jit.Entry`) becomes an object file."""

import gc
import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

import llvmlite.binding as llvm
import numba
from numba import types
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys
from numba.cpython import hashing  # noqa: F401  its constants are symbols of compiled code
from numba.np import linalg as blas

from eldr_sim import intrinsics, numba_memo, shipped
from eldr_sim.cache import closed_to_others, warn
from eldr_sim.jit import Compiled, Entry, Intrinsic, can_write, module_folder, place, source_digest

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


class _ObjectLibrary(_Library):
    """Code that becomes an object file."""

    def _optimize_final_module(self) -> None:
        JITCodeLibrary._optimize_final_module(self)


class _EntryCompiler(Compiler):
    """numba's compiler, up to the whole code of an `Entry`."""

    def define_pipelines(self) -> Any:
        """Return the steps of the usual compiler, which fill such a library."""
        state = self.state
        state.library = _ObjectLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().define_pipelines()


class _Locator(UserProvidedCacheLocator):
    """Where a function is kept: by what its module is called and says, not by where it lies.

    All environments of a machine that hold the same sources compile once."""

    def __init__(self, py_func: Any, py_file: str) -> None:
        self._py_file, self._lineno = py_file, py_func.__code__.co_firstlineno
        self._cache_path = module_folder(py_func, py_file)

    def get_source_stamp(self) -> bytes:
        """Return what tells a module from others of its name."""
        return source_digest(self._py_file)

    @classmethod
    def from_function(cls, py_func: Any, py_file: str) -> Any:
        """Return the place of a function; None where nothing can be written."""
        return cls(py_func, py_file) if can_write(place()) else None


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
#: What only compiled code calls needs no code that Python could call.
_ONLY_CODE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def make_dispatcher(function: Compiled) -> Any:
    """Return numba's function, which keeps what it compiles in the cache folder."""
    options = dict(function.options)
    if function.inlined:
        options |= _ONLY_CODE | {
            "pipeline_class": RestrictedCompiler if function.restrict else InlinedCompiler
        }
    dispatcher = numba.njit(**options)(function.py_func)
    if place():
        dispatcher._cache = (InlinedCache if function.inlined else _Cache)(function.py_func)
    return dispatcher


def object_of(entry: Entry, world: Any) -> bytes:
    """Compile an entry for a `Reference` of a type; return a line with its symbol and those that it
    needs, and the object file."""
    options: dict[str, Any] = _ONLY_CODE | {"_nrt": False, "pipeline_class": _EntryCompiler}
    of = [getattr(types, name) for name in entry.numbers]
    result = numba.njit(**options)(entry.py_func).get_compile_result(of[-1](world, *of[:-1]))
    library = result.library
    with global_compiler_lock:
        library.finalize()
    whole = library._final_module
    needs = [
        each.name
        for each in (*whole.functions, *whole.global_variables)
        if each.is_declaration and not each.name.startswith("llvm.")
    ]
    line = " ".join([result.fndesc.llvm_func_name, *needs]).encode()
    code: bytes = library._codegen._tm.emit_object(whole)
    return line + b"\n" + code


def pointer_to(function: Any, *arguments: Any) -> int:
    """Return where the compiled function of a `Reference` and numbers is that returns int64, for
    calls as C has them; ``arguments``: a Reference's type and int64 or float64, by name."""
    of = [getattr(types, each) if isinstance(each, str) else each for each in arguments]
    result = function.get_compile_result(types.int64(*of))
    return int(result.library.get_pointer_to_function(result.fndesc.llvm_cfunc_wrapper_name))


def type_of(function: Intrinsic) -> Any:
    """Return numba's type of what stands for a function of `intrinsics`."""
    return cpu_target.typing_context.resolve_value_type(getattr(intrinsics, function.name))


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
