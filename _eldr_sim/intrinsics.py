"""Instructions that compiled functions use and Python has not, and calls by address; where they are
used stands `jit.Intrinsic`, for this takes numba."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_INTEGER = ir.IntType(64)


@intrinsic
def popcount(_typing: Any, _word: Any) -> Any:
    """Count the set bits of a uint64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ctpop(args[0])

    return types.uint64(types.uint64), codegen


@intrinsic
def lowest(_typing: Any, _word: Any) -> Any:
    """Return the place of the lowest set bit of a uint64 that is not zero, int64."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.uint64), codegen


@intrinsic
def prefetch(_typing: Any, row: Any, index: Any) -> Any:
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


@intrinsic
def ask(_typing: Any, _address: Any, _one: Any, _other: Any) -> Any:
    """Call what is at an address with two integers."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INTEGER, [_INTEGER, _INTEGER])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic
def execute(_typing: Any, _address: Any, world: Any, _leader: Any) -> Any:
    """Call the executor at an address, an `Entry`; what it raises is raised."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, *of = signature.args
        calls = context.call_conv
        kind = calls.get_function_type(signature.return_type, of).as_pointer()
        executor = builder.inttoptr(args[0], kind)
        status, result = calls.call_function(builder, executor, signature.return_type, of, args[1:])
        with cgutils.if_unlikely(builder, status.is_error):
            calls.return_status_propagate(builder, status)
        return result

    return types.float64(types.int64, world, types.int64), codegen


@intrinsic
def decide(_typing: Any, _address: Any, _books: Any, _kind: Any, _tokens: Any, last: Any) -> Any:
    """Call the decision at an address, see `decision_address`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        own = [cgutils.voidptr_t, _INTEGER, _INTEGER, args[4].type]
        where = builder.inttoptr(args[0], ir.FunctionType(_INTEGER, own).as_pointer())
        return builder.call(where, [builder.inttoptr(args[1], own[0]), *args[2:]])

    return types.int64(*[types.int64] * 4, last), codegen
