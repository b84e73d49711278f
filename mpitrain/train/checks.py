"""Warnings and errors for what a model or a loss returns."""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mpitrain.config import TrainConfig
from mpitrain.data.samples import kind_of
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import Communicator, refuse_differences
from mpitrain.tasks.task import Losses, Task
from mpitrain.train.callbacks import Callback
from mpitrain.train.means import is_weighted

logger = logging.getLogger("mpitrain")

MAX_NAMED = 4  # weights that a message names

DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)

INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)

HOOKS = (
    "on_train_",
    "on_validation_",
    "on_test_",
    "on_predict_",
    "on_fit_",
    "on_before_",
    "on_after_",
    "on_epoch_",
    "on_save_",
    "on_load_",
    "test_step",
)
"""With what names of Lightning's hooks begin."""

VARIES = (
    "%s has other shapes in other batches, %s now: if that is padding, it counts, and "
    "differs with the number of ranks. Return values and weights, 0 at padding, or a "
    "mean of each sample, (N,)"
)
PAIRS = (
    "%s is %s, a value of each pair of two samples, and of other pairs in other "
    "batches: outputs (N, 1) beside targets (N,) make such. Expected a value of each "
    "sample, (N,): outputs.squeeze(1)"
)


def check_same_config(config: TrainConfig, ranks: Communicator) -> None:
    """Refuse configurations that differ between ranks; collective."""
    settings = config.as_plain("").items()
    of_ranks = ranks.allgather([f"{name} {value}" for name, value in settings])
    for of_one in zip(*of_ranks, strict=True):
        refuse_differences(dict(enumerate(of_one)), "the TrainConfig", kind=UsageError)


def check_metrics(found: Any) -> Mapping[str, Any]:
    """Return what a validation step returned, if it is metrics by name."""
    if isinstance(found, Mapping):
        return found
    raise UsageError(
        f"validation_step returned {kind_of(found)}; expected a dict of metrics by "
        'name, such as {"loss": losses}'
    )


def warn_of_values(values: Mapping[str, Any], warned: set[Any]) -> Mapping[str, Any]:
    """Return the values; warn once of those that may depend on the number of ranks.

    Those that are one number for a batch, and those of places, such as tokens, whose
    number varies: most often with the padding, which has no weight of 0.
    """
    # ``warned`` has names that were warned of, and pairs of a name and a shape seen, or
    # of a name and the words for one that has had a shape other than (N, N).
    for name, it in values.items():
        if getattr(it, "ndim", 0) > 1 and (name, it.shape[1:]) not in warned:
            varies = any(type(key) is tuple and key[0] == name for key in warned)
            warned.add((name, it.shape[1:]))
            if it.shape[0] != it.shape[1] or it.ndim > 2:
                warned.add((name, "is no square"))
            if varies and name not in warned and dist.get_rank() == 0:
                warned.add(name)
                are_pairs = (name, "is no square") not in warned
                logger.warning(PAIRS if are_pairs else VARIES, *(name, tuple(it.shape)))
    found = {
        name
        for name, it in values.items()
        if getattr(it, "ndim", 0) == 0 and not is_weighted(it)
    }
    if dist.get_rank() == 0 and (new := found - warned):
        warned.update(new)
        logger.warning(
            "%s is a scalar for a whole batch, and averaged over batches, which in "
            "training depend on the number of ranks: right for a mean over samples, "
            "not with class weights or for F1. Return one value per sample, (N,), as "
            'with reduction="none", or values and weights',
            ", ".join(sorted(new)),
        )
    return values


def warn_of_ignored(trainer: Any) -> None:
    """Warn of fields that are set, and of hooks, that have no effect; local."""
    config, task, callbacks = trainer.config, trainer.task, trainer.callbacks
    changed = config.changed.items()
    of_tasks = {name for name, facts in changed if facts.is_for_task}
    if ignored := of_tasks.difference(task.uses_settings):
        logger.warning(
            "%s does not have %s in uses_settings: no effect, unless its code reads "
            "them",
            *(type(task).__name__, ", ".join(sorted(ignored))),
        )
    hooks = [] if isinstance(task, Callback) else [*filter(_is_hook, dir(task))]
    if found := [it for it in hooks if callable(getattr(task, it))]:
        logger.warning(
            "%s of %s: never called by the Trainer; expected hooks of a "
            "mpitrain.Callback, passed in callbacks=, and validation_step for a test",
            *(", ".join(found), type(task).__name__),
        )
    for_command = {name for name, facts in changed if facts.is_for_command}
    ignored = for_command.difference(*(it.uses_settings for it in callbacks))
    if ignored and not trainer.uses_whole_config:
        logger.warning(
            "Trainer ignores %s of its TrainConfig; pass callbacks, such as "
            "mpitrain.default_callbacks(run_dir, config), instead",
            ", ".join(sorted(ignored)),
        )


def _is_hook(name: str) -> bool:
    """Whether a method is called by its name, here or by Lightning's trainer.

    >>> [_is_hook(it) for it in ("on_step_end", "on_train_epoch_end", "on_manifold")]
    [True, True, False]
    """
    is_ours = name.startswith("on_") and hasattr(Callback, name)
    return is_ours or name.startswith(HOOKS)


FUNCTIONS = {"optimizer": ["model"], "scheduler": ["optimizer", "total_steps"]}
"""The arguments of a Trainer's functions."""

EXAMPLES = {
    "optimizer": "lambda model: torch.optim.AdamW(model.parameters())",
    "scheduler": "lambda optimizer, total_steps: StepLR(optimizer, 100)",
}


def check_loss(loss: Any) -> None:
    """Refuse a ``loss=`` that cannot be called with outputs and targets."""
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        found = f"the class {loss.__name__}" if isinstance(loss, type) else repr(loss)
        raise UsageError(
            f"loss= is {found}; expected a function of outputs and targets, or an "
            "object such as nn.MSELoss(reduction='none')"
        )


def bind_functions(task: Task, **functions: Any) -> None:
    """Let a Trainer's functions stand in for the methods of its task."""
    for name, it in functions.items():
        if it is None:
            continue
        if isinstance(it, type) or not callable(it):
            raise UsageError(
                f"{name}= has to be a function, found {type(it).__name__}; such as "
                f"{name}={EXAMPLES[name]}"
            )
        names = FUNCTIONS[name]
        if not takes(it, *names):
            raise UsageError(
                f"{name}= has to be a function of {' and '.join(names)}, found "
                f"{getattr(it, '__name__', it)}{inspect.signature(it)}"
            )
        setattr(task, f"configure_{name}s", it)


def call_step(
    step: Callable[..., Losses], model: Any, batch: Any, *names: str
) -> Losses:
    """Call a training step; say so if it takes no name of an optimizer."""
    # Before the call: a TypeError of it may be of the step's own code.
    if names and not takes(step, model, batch, *names):
        raise UsageError(
            f"{step.__qualname__} is called with the name of one of several "
            f"optimizers, {names[-1]!r}; expected the arguments model, batch, name"
        ).on_all_ranks()
    return step(model, batch, *names)


def takes(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, as far as it says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        pass
    return True


def refuse_buffers(
    changed: Sequence[str],
    found: str,
    expected: str,
    ranks: Communicator,
    *,
    warning: str | None,
) -> None:
    """Refuse buffers that a step has changed on any rank; collective.

    With ``warning``, what becomes of them on one rank, that is said instead.
    """
    # A rank without samples may change none; all are to raise.
    names = sorted({*itertools.chain.from_iterable(ranks.allgather([*changed]))})
    found = f"{found}: {shown_names(names)}"
    if names and warning is None:
        raise UsageError(f"{found}; {expected}").on_all_ranks()
    if names:
        logger.warning(
            "%s; %s, and refused on several ranks; %s", found, warning, expected
        )


def shown_names(names: Sequence[object], most: int = MAX_NAMED, by: str = ", ") -> str:
    """Name some weights, or samples.

    >>> shown_names("abcdef"), shown_names([3, 1], by=" ")
    ('a, b, c, d and 2 more', '3 1')
    """
    more = len(names) - most
    return by.join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def warn_of_eval_mode(model: nn.Module, in_eval_mode: Sequence[nn.Module]) -> bool:
    """Name parts whose dropout is off while they are trained; whether there are some.

    A part keeps the mode that the user gave it, and `from_pretrained` gives this one.
    """
    modules, found = {*in_eval_mode}, list[str]()
    for name, module in model.named_modules():
        is_within = any(name.startswith(f"{parent}.") for parent in found)
        if module not in modules or is_within:
            continue
        off = (it for it in module.modules() if it in modules)
        drops = any(isinstance(it, DROPOUTS) and it.p > 0 for it in off)
        if drops and any(weight.requires_grad for weight in module.parameters()):
            found.append(name)
    if found:
        logger.warning(
            "%s: in evaluation mode, as from_pretrained() returns a model, and kept in "
            "it, without dropout, though its weights require gradients. Expected "
            "model.train() before the Trainer, if that is not meant",
            shown_names(found),
        )
    return bool(found)


def warn_of_float64(model: nn.Module, config: TrainConfig) -> None:
    """Say that a model of float64 is trained in another precision; local."""
    dtypes = {it.dtype for it in model.parameters() if it.is_floating_point()}
    if dtypes == {torch.float64} and config.precision != "fp64":
        logger.warning(
            "the model is of float64, and is trained with precision='%s'; expected "
            "precision='fp64' in the TrainConfig, if that is not meant",
            config.precision,
        )


def warn_of_converted(model: nn.Module, config: TrainConfig) -> None:
    """Name weights and buffers of 16 bits, and others of 64, that change; local."""
    if config.precision == "fp64":
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    is_double = all(it.dtype == torch.float64 for it in model.parameters())
    kinds = [torch.bfloat16, torch.float16, *[torch.float64] * (not is_double)]
    computes_16 = config.precision in ("bf16", "fp16")
    for kind in kinds:
        if not (found := [name for name, it in named if it.dtype == kind]):
            continue
        advice = "precision='fp64' keeps 64 bits; what needs them alone may be an "
        advice += "attribute that is no buffer"
        if kind != torch.float64:
            advice = "precision='bf16' computes in 16 bits" * (not computes_16)
        logger.warning(
            "these weights or buffers are %s and are trained as float32, frozen ones "
            "too: %s%s",
            str(kind).removeprefix("torch."),
            shown_names(found),
            f". {advice}" * bool(advice),
        )


def explain_no_grad(error: BaseException) -> None:
    """Say how a validation computes derivatives, to an error of one that cannot."""
    if "does not require grad" in str(error):
        error.add_note(
            "Validations and predictions run under torch.no_grad(); expected `with "
            "torch.enable_grad():` around what computes derivatives, in the step or in "
            "forward"
        )


def explain_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> None:
    """Add the inputs to an error of ``forward``, or say that it takes other ones."""
    given = ", ".join(map(kind_of, (*args, *([kwargs] if kwargs else []))))
    signature = inspect.signature(model.forward)
    names = ", ".join(signature.parameters)
    whole = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else {}
    unknown = [str(it) for it in whole if it not in signature.parameters]
    expected = (
        f"let samples be dicts of them ({names} as keys), or write the call in the "
        "training_step and validation_step of a mpitrain.Task: model(batch.inputs[0], "
        "...)"
    )
    hint = ""
    if 0 < len(unknown) < len(whole):  # so it was not passed by name
        expected = (
            f"forward does not take {', '.join(unknown)} of the batch: return (inputs, "
            "targets) from collate_fn, or give it an argument of this name"
        )
        hint = f"; {expected}"
    if isinstance(error, TypeError):
        # Bound again: the error may be of a layer within.
        try:
            signature.bind(*args, **kwargs)
        except TypeError as why:
            raise DataError(
                f"{type(model).__name__}.forward({names}) was called with {given}: "
                f"{why}. Expected the arguments of the model: {expected}"
            ) from None
    is_list = bool(args) and isinstance(args[0], list) and len(args[0]) == 1
    if is_list and isinstance(error, TypeError | AttributeError):
        hint = (
            "; samples of a TensorDataset of one tensor are lists of it: expected "
            "list(tensor) as the data set, or a TensorDataset of inputs and targets"
        )
    note = f"{type(model).__name__} was called with {given}{hint}"
    if args and getattr(args[0], "dtype", None) in INTEGERS:
        note += (
            ". For a model of floats convert them in the data set (.float()), or ask "
            "for images: Trainer's mean_std=, or --normalize imagenet"
        )
    error.add_note(note)
