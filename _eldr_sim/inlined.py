"""Compiled functions that only other compiled functions call: compiled once, where they end up.

numba makes every function ready to run by itself: it optimises its code, with that of all
functions that it calls, and translates it for the processor. A caller needs none of that: it takes
in the intermediate code and does the same again. So a function deep in the simulator was optimised
once for each level above it. Here it stays intermediate code, and is kept in the cache as such.
"""

from typing import Any, ClassVar

import llvmlite.binding as llvm
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult

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
    """The same for functions whose arrays do not overlap, as C's ``restrict`` says.

    Loops over several of them need no test of that before they run in vector registers.
    """

    def define_pipelines(self) -> Any:
        """Return the steps of the compiler, which tell LLVM so."""
        self.state.flags.noalias = True
        return super().define_pipelines()


class _Results(CompileResultCacheImpl):
    def rebuild(self, target_context: Any, payload: Any) -> Any:
        """Return a function from what the cache has of it."""
        (name, _, bitcode), fndesc, environment, signature, _, lifted, annotation, *rest = payload
        library = _Library(target_context.codegen(), name)
        library._final_module = llvm.parse_bitcode(bitcode)
        library._finalize_final_module()
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


class InlinedCache(FunctionCache):
    """Keeps such functions in the cache folder."""

    _impl_class = _Results
