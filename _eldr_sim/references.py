"""Named tuples of arrays that compiled functions pass on by reference: an address, and no more.
numba hands a tuple over as several numbers for each array, apart and together again at every call:
much of the time of compiling. A `Reference` lies in memory once, and a member is read where it is
named."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, override"

import ctypes
import operator
import struct
from hashlib import blake2b
from typing import Any

import numpy as np
from llvmlite import ir
from numba import typeof, types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed, lower_builtin, lower_getattr_generic
from numba.core.typing.templates import (
    AbstractTemplate,
    AttributeTemplate,
    infer_getattr,
    infer_global,
    signature,
)
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

_INDEX = ir.IntType(32)
_TYPES: dict[tuple[Any, ...], "ReferenceType"] = {}


class ReferenceType(types.Type):
    """Where a tuple is."""

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        # All that mangled names show of the type: they stand in the code of every call.
        digest = blake2b(str(whole).encode(), digest_size=6).hexdigest()
        self._hash = int(digest, 16)  # of a tuple's type it takes all its members, at every call
        super().__init__(f"{getattr(whole, 'instance_class', tuple).__name__}{digest}")

    def __hash__(self) -> int:
        return self._hash

    @property
    def key(self) -> Any:
        """Return what makes the type what it is."""
        return self.whole


@register_model(ReferenceType)
class _Model(models.OpaqueModel):
    """An address."""


class Reference:
    """A named tuple of arrays, numbers, callbacks and such tuples, for compiled functions.
    ``whole``: the tuple; its arrays and numbers are looked at now."""

    def __init__(self, whole: tuple[Any, ...]) -> None:
        self.whole = whole
        memory, kinds = bytearray(), list[Any]()
        _lay_out(whole, memory, kinds)
        if (kind := tuple(kinds)) not in _TYPES:  # to ask numba takes milliseconds
            _TYPES[kind] = ReferenceType(typeof(whole))
        self.type = _TYPES[kind]
        self._memory = ctypes.create_string_buffer(bytes(memory), len(memory))
        self.address = ctypes.addressof(self._memory)


def _lay_out(value: Any, memory: bytearray, kinds: list[Any]) -> None:
    """Append a value as numba lays it out, see `numba.core.datamodel.models`; and what it is."""
    kinds.append(type(value))
    if isinstance(value, bool):
        memory += bytes([value])
        return
    memory += bytes(-len(memory) % 8)
    if isinstance(value, tuple):
        for member in value:
            _lay_out(member, memory, kinds)
        memory += bytes(-len(memory) % 8)
    elif isinstance(value, np.ndarray):
        kinds += value.dtype, value.ndim, value.flags.num
        words = (0, 0, value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
        memory += struct.pack(f"{len(words)}q", *words)
    else:
        memory += struct.pack("d" if isinstance(value, float) else "q", value)


@typeof_impl.register(Reference)
def _typeof(value: Reference, _context: Any) -> Any:
    return value.type


@unbox(ReferenceType)
def _unbox(_type: Any, value: Any, compiler: Any) -> Any:
    address = compiler.pyapi.object_getattr_string(value, "address")
    place = compiler.pyapi.long_as_voidptr(address)
    compiler.pyapi.decref(address)
    return NativeValue(place)


def _part(member: Any) -> Any:
    return ReferenceType(member) if isinstance(member, types.BaseTuple) else member


@infer_getattr
class _Members(AttributeTemplate):
    key = ReferenceType

    def generic_resolve(self, reference: Any, name: str) -> Any:
        """Return the type of a member, None if there is no such one."""
        fields = getattr(reference.whole, "fields", ())
        return _part(reference.whole[fields.index(name)]) if name in fields else None


@infer_global(operator.getitem)
class _Items(AbstractTemplate):
    def generic(self, args: Any, _kws: Any) -> Any:
        """Return the item type of a homogeneous tuple."""
        reference, index = args
        if not isinstance(reference, ReferenceType) or not isinstance(index, types.Integer):
            return None
        return signature(_part(reference.whole.dtype), reference, types.intp)


def _at(context: Any, builder: Any, whole: Any, place: Any, index: Any, part: Any) -> Any:
    place = builder.bitcast(place, context.get_data_type(whole).as_pointer())
    place = builder.gep(place, [_INDEX(0), index], inbounds=True)
    if isinstance(part, ReferenceType):
        return builder.bitcast(place, cgutils.voidptr_t)
    return impl_ret_borrowed(context, builder, part, context.unpack_value(builder, part, place))


@lower_getattr_generic(ReferenceType)
def _member(context: Any, builder: Any, type_: Any, place: Any, name: str) -> Any:
    index = type_.whole.fields.index(name)
    return _at(context, builder, type_.whole, place, _INDEX(index), _part(type_.whole[index]))


@lower_builtin(operator.getitem, ReferenceType, types.Integer)
def _item(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    place, index = args
    whole = signature.args[0].whole
    return _at(context, builder, whole, place, index, signature.return_type)
