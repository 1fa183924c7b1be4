"""What numba knows of `references.Reference`: an address, of which a member is read where it is
named."""

# mypy: disable-error-code="no-untyped-call, untyped-decorator, override"

import operator
from hashlib import blake2b
from typing import Any

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
from numba.extending import NativeValue, models, register_model, unbox

_INDEX = ir.IntType(32)


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


def reference_type(whole: tuple[Any, ...]) -> ReferenceType:
    """Return the type of a reference to a tuple."""
    return ReferenceType(typeof(whole))


@register_model(ReferenceType)
class _Model(models.OpaqueModel):
    """An address."""


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
