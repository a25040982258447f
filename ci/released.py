# SPDX-License-Identifier: Apache-2.0
"""Why released runners fail clauses: for each, the line of their source that explains it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GPU = "vllm_omni/worker/gpu_model_runner.py"
NPU = "vllm_omni/platforms/npu/worker/npu_model_runner.py"
V2 = "vllm_omni/worker_v2/model_states/omni_model_state.py"


@dataclass(frozen=True)
class Reason:
    """Why ``clauses`` fail in releases from ``first`` to ``last``: the first line of ``method`` that has ``mark``."""

    clauses: tuple[str, ...]
    first: str
    last: str
    method: str
    mark: str
    text: str
    runners: tuple[str, ...] = ("gpu-v1", "npu-v1")
    source: str = GPU

    def explains(self, clause: str, release: str, runner: str) -> bool:
        within = _number(self.first) <= _number(release) <= _number(self.last)
        return within and clause in self.clauses and runner in self.runners

    def line(self, packages: Path) -> int | None:
        """The line's number, counted from 1, in the release that lies in the folder ``packages``."""
        lines = (packages / self.source).read_text(encoding="utf-8").splitlines()
        start = next((n for n, line in enumerate(lines) if re.match(rf"\s+def {self.method}\(", line)), len(lines))
        return next((n + 1 for n in range(start, len(lines)) if re.search(self.mark, lines[n])), None)


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def reasons(clause: str, release: str, runner: str) -> Iterator[Reason]:
    return (reason for reason in REASONS if reason.explains(clause, release, runner))


REASONS = (
    Reason(
        ("M1", "M2", "M3", "M4", "M5", "M6", "M8", "M9", "E3"),
        "0.20",
        "0.20",
        "_preprocess",
        r'\["request_id"\]',
        "the request id is all it tells a hook; the three fields do not exist, and what the state holds under their "
        "names passes for them",
    ),
    Reason(
        ("M10", "R3", "R4", "R5"),
        "0.20",
        "0.20",
        "_preprocess",
        r"self\.model\.preprocess\(",
        "every row goes here; neither `preprocess_batch` nor `preprocess_decode_batch` is ever called",
    ),
    Reason(
        ("R6", "R9", "T1", "T2", "T3", "T7", "E8"),
        "0.20",
        "0.20",
        "_preprocess",
        "span_len == 1",
        "every one-token row goes to MTP, a prefill tail and a one-token prompt too, and MTP overwrites its embedding",
    ),
    Reason(
        ("M9",),
        "0.22",
        "0.32",
        "_update_intermediate_buffer",
        r"in upd\.items\(\)",
        "stores whatever a hook returns into the live buffer, the three fields too, where the forward pass reads them",
    ),
    Reason(
        ("R4",),
        "0.22",
        "0.28",
        "_preprocess",
        r"callable\(batch_decode_preprocess\) and self\.has_talker_mtp",
        "without MTP the batched hook is never called",
    ),
    Reason(
        ("R7",),
        "0.22",
        "0.32",
        "_preprocess",
        r"(input_ids\.index_copy_\(|index_copy_\(0, offsets_t, req_input_ids)",
        "copies the batched hook's token ids without asking whether they are the object it was given",
    ),
    Reason(
        ("R10",),
        "0.20",
        "0.24",
        "_preprocess",
        r"input_ids=input_ids\[s:e\]",
        "`input_ids` is None where the multimodal path selected embeddings",
    ),
    Reason(
        ("T8",),
        "0.20",
        "0.20",
        "_talker_mtp_forward",
        r"first_req_id = decode_req_ids\[0\]",
        "the first request's seed serves every row of the batch",
        runners=("gpu-v1",),
    ),
    Reason(
        ("T8",),
        "0.22",
        "0.30",
        "_talker_mtp_forward",
        r"num_tokens_padded = batch_desc\.num_tokens",
        "a captured MTP is replayed whether or not a row has its own generator, and a replay ignores keywords",
    ),
    Reason(
        ("T9",),
        "0.20",
        "0.20",
        "_store_value",
        r"to\(.cpu.\)",
        "a tensor that is on the host already is not copied by this; results of other devices are",
    ),
    Reason(
        ("T9",),
        "0.22",
        "0.32",
        "_store_value",
        "is_cuda",
        "only CUDA tensors are copied to the host; on CPU and NPU the stored tensor is the device's own",
    ),
    Reason(
        ("T11",),
        "0.20",
        "0.20",
        "_talker_mtp_forward",
        r"code_predictor_codes\[idx",
        "slices the codes without asking whether there are any",
        runners=("gpu-v1",),
    ),
    Reason(
        ("T11",),
        "0.22",
        "0.22",
        "_talker_mtp_forward",
        r"code_predictor_codes\[idx",
        "slices the codes without asking whether there are any",
    ),
    Reason(
        ("T8",),
        "0.20",
        "0.20",
        "_talker_mtp_forward",
        r"decode_req_ids\[0\]",
        "the first request's general seed serves every row of the batch; its MTP seed is never read",
        runners=("npu-v1",),
        source=NPU,
    ),
    Reason(
        ("T11",),
        "0.20",
        "0.20",
        "_talker_mtp_forward",
        r"code_predictor_codes\.detach",
        "copies the codes without asking whether there are any",
        runners=("npu-v1",),
        source=NPU,
    ),
    Reason(
        ("E1",),
        "0.20",
        "0.32",
        "_collect_additional_information_for_prefill",
        r"len\(req_state\.prompt_token_ids\)",
        "takes the length of token ids that are None",
    ),
    Reason(
        ("E4",),
        "0.20",
        "0.32",
        "_preprocess",
        r"start_offset = int\(self\.query_start_loc",
        "takes spans and lengths as they come; nothing is checked before the first hook",
    ),
    Reason(
        ("E5", "E8"),
        "0.20",
        "0.32",
        "_preprocess",
        r"seg_len = min\(span_len",
        "cuts or leaves rows without a word; the copy that follows fails where source and target overlap",
    ),
    Reason(
        ("E5b",),
        "0.20",
        "0.20",
        "_preprocess",
        r"self\.model\.preprocess\(",
        "there is no batched hook, and so nothing to refuse",
    ),
    Reason(
        ("E5b",),
        "0.22",
        "0.32",
        "_preprocess",
        r"text_step, updates = batch_decode_preprocess\(",
        "unpacks what the hook returns and writes it as it comes; only torch's own errors stop it, half way",
    ),
    Reason(
        ("E6",),
        "0.20",
        "0.32",
        "_preprocess",
        r"update_dict\.pop\(",
        "takes `mtp_inputs` out of an eligible row's updates only; those of other rows are stored",
    ),
    Reason(
        ("E7",),
        "0.20",
        "0.32",
        "_preprocess",
        r"update_dict\.pop\(",
        "an eligible row without `mtp_inputs` is a KeyError",
    ),
    Reason(
        ("E3", "T8"),
        "0.22",
        "0.32",
        "_talker_mtp_forward",
        r'talker_kwargs\["generator"\]',
        "a replayed row draws from its request's generator again, and so moves it on",
    ),
    Reason(
        ("E9",),
        "0.20",
        "0.32",
        "_preprocess",
        r'req_infos\["request_id"\] =',
        "writes into the live buffer whatever it is; one that is a list ends in a TypeError that names no request",
    ),
    Reason(
        ("T5",),
        "0.20",
        "0.20",
        "_preprocess",
        r"last_talker_hidden\.gpu\[decode_slice\]",
        "fills the MTP buffer row by row, over hidden states in it that a hook has handed over for a later row",
    ),
    Reason(
        ("M5", "M7", "M8", "R2", "R3", "R8", "T1", "T5", "E1", "E2", "E3", "E5b"),
        "0.30",
        "0.30",
        "run_preprocess",
        r"= batch_decode_preprocess\(",
        "unpacks five values from every batched hook, also where the model has no MTP and returns three",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("M1", "M2", "M3", "M4", "M6", "M8", "R3", "R4", "R5", "R8", "T4", "T6", "T10"),
        "0.30",
        "0.30",
        "_pack_mtp_batch",
        r"packed_hidden = packed_hidden\.reshape\(bsz",
        "inputs packed for the batched hook's rows are taken for all rows, those of scalar hooks in the same step too",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("R6", "R9", "R10", "T1", "T2", "T3", "T7", "E8"),
        "0.30",
        "0.30",
        "run_preprocess",
        r"mtp_inputs is not None and n_tok == 1",
        "queues every one-token row with `mtp_inputs` for MTP, whatever its phase: a tail's embedding is lost",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("M9",),
        "0.30",
        "0.30",
        "run_preprocess",
        r"info = \{key: value for key, value in buf\.items",
        "the fields go into a copy of the live buffer, so the forward pass and `postprocess` do not see them",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("R7",),
        "0.30",
        "0.30",
        "run_preprocess",
        r"input_ids\.index_copy_\(0, batch_offsets",
        "copies token ids without casting them to the buffer's dtype",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("T9",),
        "0.30",
        "0.30",
        "run_postprocess",
        r"def run_postprocess",
        "what `postprocess` returns is stored as it is where no copy to the host is needed, on CPU",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("T11",),
        "0.30",
        "0.30",
        "_call_mtp_with_sampling",
        r"code_chunks else None",
        "joins the codes of the rows that made some, and so gives them to other rows",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("E4",),
        "0.30",
        "0.30",
        "run_preprocess",
        r"else n_tok > 1",
        "an unknown length falls back to the span; nothing is refused",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("E5", "E7"),
        "0.30",
        "0.30",
        "run_preprocess",
        r"updates\.pop\(\"mtp_inputs\", None\)",
        "takes what the hook returns as it comes; torch's own errors stop it half way, and nothing is said",
        runners=("gpu-v2",),
        source=V2,
    ),
    Reason(
        ("E9",),
        "0.30",
        "0.30",
        "run_preprocess",
        r"in buf\.items\(\)",
        "takes the live buffer for a dictionary; one that is a list ends in an AttributeError that names no request",
        runners=("gpu-v2",),
        source=V2,
    ),
)
