# SPDX-License-Identifier: Apache-2.0
"""Which row of the table a runner class fits: judged by what its code offers, never by a version string.

The released code need not be called for that. Every function must take the arguments that the mixin gives it, and the
code of every method must name what the mixin takes from the same objects.
"""

from __future__ import annotations

import dis
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

from omni_npu_phase.releases.table import EAGER, RUNTIMES, Runtime, release_of
from omni_npu_phase.settings import version_of

logger = logging.getLogger(__name__)
PREPROCESS_VALUES = 6
"""How many values ``_preprocess`` returns: token ids, embeddings, then what is passed through."""


class UnsupportedRuntimeError(RuntimeError):
    """No known runtime matches a runner class; the message lists what is missing or different."""


class Taken:
    """A function of released code, and what the mixin takes from it."""

    def __init__(self, given: str | None = None, *, by_name: str = "", names: str = "") -> None:
        """Each is a string of names. ``given``, ``by_name``: parameters that it is given by position, in this order,
        and by name; None where only released code calls it. ``names``: attributes, keywords and keys in its code.
        """
        self.given = None if given is None else given.split()
        self.by_name, self.names = by_name.split(), names.split()


def methods_of(runtime: Runtime) -> Mapping[str, Taken]:
    """What is taken from the methods of a runner of this runtime."""
    methods = {
        "_preprocess": Taken(
            "scheduler_output num_input_tokens intermediate_tensors",
            names="input_batch req_ids requests query_start_loc num_scheduled_tokens model has_preprocess preprocess "
            "input_embeds model_intermediate_buffer input_ids inputs_embeds has_talker_mtp mtp_inputs "
            f"{'preprocess_decode_batch' if runtime.batched_hooks else ''} {runtime.keywords} {runtime.step_names}",
        ),
        "_talker_mtp_forward": Taken(
            runtime.mtp_parameters,
            names="talker_mtp talker_mtp_input_ids talker_mtp_inputs_embeds last_talker_hidden text_step requests "
            "vllm_config sampling_params subtalker_sampling_params talker_mtp_output_key "
            f"{f'extra_args generator {runtime.seed_key}' if runtime.mtp_seeds else ''} {runtime.mtp_names}",
        ),
        "_update_intermediate_buffer": Taken(
            "req_id upd",
            names="requests model_intermediate_buffer additional_information_cpu gpu_resident_buffer_keys",
        ),
        "_collect_additional_information_for_prefill": Taken(
            "num_scheduled_tokens_np",
            names="requests prompt_embeds_cpu num_computed_tokens_cpu prompt_token_ids inputs_embeds",
        ),
        "_maybe_attach_mimo_audio_req_infos": Taken("req_state req_infos req_id"),
        "_determine_batch_execution_and_padding": Taken(
            "", by_name="num_tokens num_reqs num_scheduled_tokens_np max_num_scheduled_tokens use_cascade_attn"
        ),
        "_process_additional_information_updates": Taken(),
    }
    if runtime.batched_hooks:
        fills_rows = "preprocess_batch_fills_rows" if runtime.fills_rows else ""
        methods["_maybe_run_batch_preprocess"] = Taken(names=f"preprocess_batch {fills_rows}")
    return methods


def functions_of(runtime: Runtime) -> Mapping[str, Taken]:
    """What is taken from the installed packages, as ``module:name``."""
    return {
        runtime.graph_wrapper: Taken(""),
        runtime.mtp_context: Taken("attn_metadata vllm_config", by_name=f"{runtime.mode_keyword} batch_descriptor"),
        EAGER: Taken(),
    }


def mismatches(runtime: Runtime, released: Sequence[type]) -> list[str]:
    """What a runner, or an installed package, lacks or has otherwise, one line each; empty when the runner fits.

    ``released``: the runner's classes in method resolution order.
    """
    values = values_returned(released, "_preprocess") - {PREPROCESS_VALUES}
    return [
        *method_mismatches(released, methods_of(runtime)),
        *(line for name, taken in functions_of(runtime).items() for line in _function_mismatches(name, taken)),
        *(f"_preprocess returns {found} values, not {PREPROCESS_VALUES}" for found in sorted(values)),
    ]


@cache
def runtime_of(released: tuple[type, ...]) -> Runtime:
    """The runtime of a released V1 runner, given as the classes behind the mixin in method resolution order.

    As :func:`first_that_fits` says.
    """
    return first_that_fits("runner", released, RUNTIMES, mismatches)


def first_that_fits(
    kind: str,
    released: Sequence[type],
    known: Sequence[Runtime],
    differences: Callable[[Runtime, Sequence[type]], list[str]],
) -> Runtime:
    """The first runtime from which classes have no differences.

    A release that was not tested but offers what a tested one does is accepted, and noted in the log. Raises
    :class:`UnsupportedRuntimeError` with everything in which the classes differ from the runtime they are most like.
    """
    found: dict[str, list[str]] = {}
    for runtime in known:
        found[runtime.name] = differences(runtime, released)
        if found[runtime.name]:
            continue
        installed = version_of("vllm-omni")
        if installed is not None and release_of(installed) != runtime.release:
            logger.warning(
                "vllm-omni %s is not among the releases this was tested with; its %s offers what that of %s does, "
                "and is treated alike.",
                *(installed, kind, runtime.name),
            )
        return runtime
    nearest = min(found, key=lambda name: len(found[name]))
    raise UnsupportedRuntimeError(
        f"{released[0].__module__}.{released[0].__qualname__} is no {kind} that omni-npu-phase knows. "
        f"It is most like {nearest}, but: {'; '.join(found[nearest])}. Known: {', '.join(found)}."
    )


def method_mismatches(released: Sequence[type], methods: Mapping[str, Taken]) -> Iterator[str]:
    """What the methods of classes lack or have otherwise, a line each."""
    for name, taken in methods.items():
        method = next((vars(cls)[name] for cls in released if name in vars(cls)), None)
        if not callable(method):
            yield f"no method {name}"
            continue
        yield from _call_mismatches(name, method, taken, bound=(None,))
        named = names_in(released, name)
        yield from (f"{name} names no {wanted}" for wanted in taken.names if wanted not in named)


def _function_mismatches(name: str, taken: Taken) -> Iterator[str]:
    label = name.replace(":", ".")
    try:
        function = pkgutil.resolve_name(name)
    except Exception as error:  # noqa: BLE001 - whatever a package raises on import, the list must stay complete
        yield f"no {label} ({error})"
        return
    if taken.given is None or isinstance(function, type):
        return
    # An unknown name of a platform is None, not missing.
    if not callable(function):
        yield f"no {label}"
    else:
        yield from _call_mismatches(label, function, taken)


def _call_mismatches(
    name: str, function: Callable[..., Any], taken: Taken, bound: tuple[None, ...] = ()
) -> Iterator[str]:
    """What stands against calling a function as it is taken, after ``bound`` arguments that come by themselves."""
    if taken.given is None:
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        yield f"{name} has no signature ({error})"
        return
    try:
        arguments = signature.bind(*bound, *taken.given, **{own: own for own in taken.by_name}).arguments
        # Each is given its parameter's name; what *args and **kwargs collect is taken whatever it is.
        wrong = [f"{given} is its {own}" for own, given in arguments.items() if isinstance(given, str) and given != own]
    except TypeError as error:
        wrong = [str(error)]
    if wrong:
        call = ", ".join([*taken.given, *(f"{own}=..." for own in taken.by_name)])
        yield f"{name}({', '.join(signature.parameters)}) does not take ({call}): {', '.join(wrong)}"


def names_in(classes: Sequence[type], method: str) -> frozenset[str]:
    """Every attribute, keyword, variable and string that a method's code names, in vLLM-Omni and in overrides of it."""
    return frozenset(name for _, code in _codes(classes, method) for name in _names_of(code))


def values_returned(classes: Sequence[type], method: str) -> set[int]:
    """How many values vLLM-Omni's own method returns, where its code shows that: in tuples built for a return."""
    return {
        built.arg
        for is_vllm_omnis, code in _codes(classes, method)
        for built, after in pairwise(dis.get_instructions(code))
        if is_vllm_omnis and (built.opname, after.opname) == ("BUILD_TUPLE", "RETURN_VALUE") and built.arg is not None
    }


def _codes(classes: Sequence[type], method: str) -> Iterator[tuple[bool, CodeType]]:
    """A method's code in each class that has it, up to vLLM-Omni's own, and whether it is that.

    An override from elsewhere may leave the work to vLLM-Omni's method; what that replaces is not run.
    """
    for cls in classes:
        code = getattr(inspect.unwrap(vars(cls).get(method, object)), "__code__", None)
        if code is not None:
            is_vllm_omnis = cls.__module__.partition(".")[0] == "vllm_omni"
            yield is_vllm_omnis, code
            if is_vllm_omnis:
                return


def _names_of(constant: Any) -> Iterator[str]:
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, CodeType):
        yield from _names_of((constant.co_names, constant.co_varnames, constant.co_consts))
    elif isinstance(constant, tuple):
        for part in constant:
            yield from _names_of(part)
