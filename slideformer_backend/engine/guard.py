"""The barrier: parameters and gradients outside the window are real tensors that settle when anybody looks.

The class of such a tensor is a generated subclass of its own class whose ``__torch_function__`` asks the tensor's
access record before any operation and tells it afterwards whether memory was written or handed out (DESIGN 3.4).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, Protocol

import torch

from ..errors import UnsupportedError
from .identity import ByIdentity
from .leaves import differentiate

_METADATA_PROPERTIES = """
    shape dtype device layout ndim requires_grad is_leaf grad_fn names is_cuda is_cpu is_sparse is_quantized is_meta
    is_nested itemsize nbytes output_nr retains_grad _version _backward_hooks _post_accumulate_grad_hooks
"""
_METADATA_METHODS = """
    size dim numel nelement stride element_size is_floating_point is_complex is_contiguous get_device is_pinned
    requires_grad_ __len__ __hash__
"""
_SLOTS: dict[str, Any] = {name: getattr(torch.Tensor, name, None) for name in dir(torch.Tensor)}
_METADATA = frozenset(
    [_SLOTS[name].__get__ for name in _METADATA_PROPERTIES.split() if name in _SLOTS]
    + [_SLOTS[name] for name in _METADATA_METHODS.split()]
    + [_SLOTS["requires_grad"].__set__, _SLOTS["_backward_hooks"].__set__]
    + [torch.is_floating_point, torch.is_complex, torch.numel]
)
_GRAD_GET = _SLOTS["grad"].__get__
_GRAD_SET = _SLOTS["grad"].__set__
_GRAD_DELETE = _SLOTS["grad"].__delete__
_DATA_SET = _SLOTS["data"].__set__
_REGISTER = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_DIFFERENTIATE = (torch.autograd.grad, torch.autograd.backward)
_TORCH_DEEPCOPIES = (torch.Tensor.__deepcopy__, torch.nn.Parameter.__deepcopy__)
_HANDS_OUT = frozenset(
    {"data_ptr", "untyped_storage", "storage", "_typed_storage", "numpy", "__array__", "__dlpack__", "share_memory_"}
)
_IN_PLACE = frozenset({"__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"})

_MOVES = frozenset(
    ["resize_", "resize_as_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"]
)
"""Methods that give their tensor other memory, or another look at it."""


class Access(Protocol):
    """What guards one tensor."""

    def before(self, writes: bool) -> None:
        """Called before an operation; ``writes``: it works in place."""

    def after(self, aliased: bool) -> None:
        """Called after an operation that wrote the tensor's memory or handed out an alias of it (``aliased``)."""

    def lent(self, aliases: Sequence[torch.Tensor]) -> None:
        """Called with tensors over the guarded tensor's memory that an operation handed out."""

    def over(self) -> None:
        """Called when an operation that ``before`` has let begin is over, whatever came of it."""

    def get_grad(self) -> torch.Tensor | None:
        """The tensor's ``grad``."""

    def set_grad(self, value: torch.Tensor | None) -> None:
        """Assignment to the tensor's ``grad``."""

    def set_data(self, value: torch.Tensor) -> None:
        """Assignment to the tensor's ``data``."""

    def hooked(self, register: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """What the method ``register`` of the tensor takes in the place of a gradient hook of user code."""

    def taken(self, gradient: torch.Tensor, is_only: bool) -> torch.Tensor:
        """What ``torch.autograd.grad`` gives for the tensor when ``gradient`` is that of a leaf which was the tensor in
        some forward; ``is_only``: in all forwards of the graph."""


_ACCESS: ByIdentity[Access] = ByIdentity()


def guard(tensor: torch.Tensor, access: Access) -> None:
    """Let ``access`` guard ``tensor`` whenever its class is a guarded class."""
    _ACCESS[tensor] = access


def unguard(tensor: torch.Tensor) -> None:
    """Forget the access record of ``tensor``."""
    _ACCESS.pop(tensor)


def access_of(tensor: torch.Tensor) -> Access | None:
    """The access record of ``tensor``, None for a tensor that is not ours."""
    return _ACCESS.get(tensor)


def drop_gradient(tensor: torch.Tensor) -> None:
    """``tensor.grad = None``, without a look at the gradient first: whoever looks waits for it to be in memory."""
    access = access_of(tensor) if hasattr(type(tensor), "_slideformer_own_class") else None
    if access is not None:
        access.set_grad(None)
    elif tensor.grad is not None:
        tensor.grad = None


@functools.cache
def guarded_class(own: type) -> type:
    """The guarded subclass of ``own``; it carries the name of ``own``, so that messages and repr stay the user's."""
    members = {
        "__torch_function__": classmethod(_torch_function),
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce_ex,
        "set_": _set,
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__slots__": (),
        "_slideformer_own_class": own,
    }
    made: type = type(own)(own.__name__, (own,), members)
    return made


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that nothing guards: a detached alias for the engine's own transfers."""
    with torch._C.DisableTorchFunctionSubclass():
        alias = tensor.detach()
    alias.__class__ = torch.Tensor
    return alias


def plain_copy(tensor: torch.Tensor) -> torch.Tensor:
    """An independent copy of a guarded tensor, of its own class, with the attributes that user code gave it."""
    with torch.no_grad():
        copied = tensor.clone()
    own = type(tensor)._slideformer_own_class  # type: ignore[attr-defined]  # set by guarded_class
    if issubclass(own, torch.nn.Parameter):
        copied = torch.nn.Parameter(copied, requires_grad=tensor.requires_grad)
    copied.__class__ = own
    copied.__dict__.update(tensor.__dict__)
    return copied


def _deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(self) not in memo:
        copied = plain_copy(self)
        if type(copied).__deepcopy__ in _TORCH_DEEPCOPIES:  # which drop attributes
            copied.__dict__.clear()
        else:  # a quantised parameter copies its scales too
            copied = type(copied).__deepcopy__(copied, memo)
        memo[id(self)] = copied
    found: torch.Tensor = memo[id(self)]
    return found


def _reduce_ex(self: torch.Tensor, protocol: int) -> Any:
    return plain_copy(self).__reduce_ex__(protocol)


def _set(self: torch.Tensor, *_: Any, **__: Any) -> None:
    _refuse_move("set_")  # which torch does not send to __torch_function__


def _refuse_move(name: str) -> NoReturn:
    raise UnsupportedError(
        f"A parameter that SlideFormer manages, or its gradient, cannot get other memory or another shape: {name}().",
        remedy=f"write values (p.data = value, p.copy_(value)), or call {name}() before accelerator.prepare()",
    )


def _torch_function(
    cls: type, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    kwargs = kwargs or {}
    if func in _METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if func in _REGISTER:
        access = access_of(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(args[0], args[1] if access is None else access.hooked(func.__name__, args[1]))
    if func in _DIFFERENTIATE and all(access_of(output) is None for output in tensors_in(args[0])):
        return differentiate(func, args, kwargs, _take_of)
    special = _property_access(func, args)
    if special is not None:
        return special()
    guarded = [(tensor, access) for tensor in tensors_in((args, kwargs)) if (access := access_of(tensor)) is not None]
    name = getattr(func, "__name__", "")
    if name in _MOVES and guarded and guarded[0][0] is args[0]:
        _refuse_move(name)
    writes = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or "out" in kwargs
    writes = writes or kwargs.get("max_norm") is not None  # of an embedding, which it renorms in place
    begun: list[Access] = []
    try:
        for _, access in guarded:
            access.before(writes)
            begun.append(access)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
    except RuntimeError as error:
        _name_devices(error, name, guarded, (args, kwargs))
        raise
    else:
        for tensor, access in guarded:
            aliases = _aliases(result, tensor)
            aliased = name in _HANDS_OUT or bool(aliases)
            if writes or aliased:
                access.after(aliased)
            if aliases:
                access.lent(aliases)
    finally:
        for access in begun:
            access.over()
    return result


def _name_devices(error: RuntimeError, name: str, guarded: Sequence[tuple[torch.Tensor, Access]], given: Any) -> None:
    """Where torch saw what is in host memory beside tensors of another device: the script expects it there. What is on
    the device anyway, and meets a batch that the script left on the host, is torch's to name."""
    host = torch.device("cpu")
    if "device" not in str(error) or any(tensor.device != host for tensor, _ in guarded):
        return
    others = {tensor.device for tensor in tensors_in(given) if tensor.dim()} - {host}
    if guarded and others:
        raise UnsupportedError(
            f"{name}() takes a parameter that SlideFormer manages, or its gradient, outside of its layer: it is on"
            f" {host} there, other tensors are on {', '.join(sorted(map(str, others)))}.",
            remedy="use it in its layer's forward, or a copy without a gradient: p.detach().to(x.device)",
        ) from error


def _take_of(tensor: torch.Tensor) -> Callable[[torch.Tensor, bool], torch.Tensor] | None:
    access = access_of(tensor)
    return None if access is None else access.taken


def _property_access(func: Callable[..., Any], args: Sequence[Any]) -> Callable[[], Any] | None:
    if func not in (_GRAD_GET, _GRAD_SET, _GRAD_DELETE, _DATA_SET):
        return None
    access = access_of(args[0])
    if access is None:
        return None
    if func == _GRAD_GET:
        return access.get_grad
    if func == _GRAD_SET:
        return functools.partial(access.set_grad, args[1])
    if func == _DATA_SET:
        return functools.partial(access.set_data, args[1])
    return functools.partial(access.set_grad, None)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors in (nested) tuples, lists and dicts (model outputs are dicts)."""
    return found_in(value, torch.Tensor)


def found_in(value: Any, kinds: type | tuple[type, ...], seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Objects of some classes in (nested) tuples, lists and dicts, each of which is looked at once."""
    if isinstance(value, kinds):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        seen = {} if seen is None else seen
        if id(value) in seen:
            return
        seen[id(value)] = value  # kept: what only an iteration has made would lend its id to another
        for item in value.values() if isinstance(value, dict) else value:
            yield from found_in(item, kinds, seen)


@torch._disable_dynamo  # type: ignore[attr-defined]  # compiled, it would come here again instead of to the storage
def _aliases(result: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors in ``result`` over the memory of ``tensor``."""
    with torch._C.DisableTorchFunctionSubclass():
        address = tensor.untyped_storage().data_ptr()
        return [
            found
            for found in tensors_in(result)
            if found is not tensor
            and found.layout is torch.strided
            and found.grad_fn is None
            and found.device == tensor.device
            and found.untyped_storage().data_ptr() == address
        ]
