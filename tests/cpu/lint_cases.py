# SPDX-License-Identifier: Apache-2.0
"""Small models for lint: what each must be found for, and what must be left alone."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """``found``: rules with their severities, each as ``rule severity``; a bare body stands in a hook of its own."""

    name: str
    found: frozenset[str]
    source: str


def _case(name: str, found: str, body: str, more: str = "") -> Case:
    wanted = frozenset(each.strip() for each in found.split(",") if each.strip())
    text = textwrap.dedent(body).strip("\n")
    if "class M" not in text:
        hook = "def preprocess(self, input_ids, input_embeds=None, **info):"
        own = textwrap.indent(textwrap.dedent(more), "    ")
        text = f"class M:\n    {hook}\n{textwrap.indent(text, ' ' * 8)}\n{own}"
    return Case(name, wanted, text + "\n")


SPAN = "span-phase error"
GUESS = "span-phase fallback"
PROGRESS = "progress-phase error"
COUNTER = "own-counter error"
FIELD = "runner-field error"
WHOLE = "whole-prompt error"
MTP = "mtp-in-prefill fallback"
CROSSING = "crossing-span fallback"
UNKNOWN = "cannot-tell unknown"

_TEST = """
if {test}:
    return self.prefill(input_ids, info)
return self.decode(input_ids, info)
"""


def _tests(found: str, **tests: str) -> list[Case]:
    return [_case(name.replace("_", " "), found, _TEST.format(test=test)) for name, test in tests.items()]


CASES = [
    # -- the span decides
    *_tests(
        SPAN,
        shape="input_ids.shape[0] > 1",
        shape_of_embeddings="input_embeds.shape[0] > 1",
        shape_from_the_end="input_ids.shape[-1] != 1",
        whole_shape="input_ids.shape != (1,)",
        a_size="input_ids.shape != torch.Size([1])",
        a_size_of_a_tuple="not torch.Size((1,)) == input_ids.size()",
        size="input_ids.size(0) >= 2",
        size_tuple="input_ids.size()[0] > 1",
        numel="input_ids.numel() > 1",
        length="len(input_ids) != 1",
        length_of_a_list="len(input_ids.tolist()) > 1",
        made_an_int="int(input_ids.shape[0]) > 1",
        reversed="1 < input_ids.shape[0]",
        negated="not input_ids.numel() == 1",
        subtracted="input_ids.shape[0] - 1",
        one_of="input_ids.shape[0] not in (1,)",
        clamped="min(input_ids.shape[0], 2) == 2",
        as_a_bool="bool(input_ids.shape[0] - 1)",
        in_parts="input_ids.shape[0] > 1 or 'state' not in info",
        with_state="not (input_ids.shape[0] == 1 and info.get('state') is not None)",
        walrus="(n := input_ids.shape[0]) > 1",
        flattened="input_ids.reshape(-1).shape[0] > 1",
        another_axis="input_ids.unsqueeze(0).shape[1] > 1",
        a_module_constant="input_ids.shape[0] > [1][0]",
        a_lambda="(lambda ids: ids.numel() > 1)(input_ids)",
        field_and_span="info['_omni_is_prefill'] and input_ids.shape[0] > 1",
        decode_or_span="not (not info['_omni_is_prefill'] or input_ids.shape[0] == 1)",
        the_rest="input_ids[1:].numel() > 0",
        the_function_numel="torch.numel(input_ids) > 1",
        an_axis_by_name="input_ids.size(dim=0) > 1",
        another_tensor="torch.as_tensor(input_ids).shape[0] > 1",
        an_item="torch.tensor(input_ids.shape[0]).item() > 1",
        an_item_of_one="torch.as_tensor([len(input_ids)], device=self.device).cpu().item() != 1",
        an_item_of_numpy="np.asarray(len(input_ids)).item() > 1",
        a_product="math.prod(input_ids.shape) > 1",
        exclusive="not (input_ids.shape[0] ^ 1) == 0",
        as_text="str(len(input_ids)) != '1'",
        whole_prompts_only="len(input_ids) == info['_omni_prompt_len']",
        keyword_name="info['input_ids'].numel() > 1",
        dimensions="input_ids.squeeze().dim() > 0",
        dimensions_as_an_attribute="input_ids.squeeze().ndim",
    ),
    _case(
        "a loop over the rest", SPAN, "for _ in input_ids[1:]:\n    return self.prefill(info)\nreturn self.decode(info)"
    ),
    _case(
        "a loop that returns at its second token",
        UNKNOWN,
        "for i, _ in enumerate(input_ids):\n    if i:\n        return self.prefill(info)\nreturn self.decode(info)",
    ),
    _case(
        "a table by name",
        SPAN,
        "kind = 'one' if len(input_ids) == 1 else 'many'\nreturn input_ids, self.tables[kind](input_ids), {}",
    ),
    _case("renamed", SPAN, "ids = input_ids\ncount = ids.shape[0]\nmany = count > 1" + _TEST.format(test="many")),
    _case("conditional expression", SPAN, "return self.prefill(info) if len(input_ids) > 1 else self.decode(info)"),
    _case("named modes", SPAN, "mode = 'p' if len(input_ids) > 1 else 'd'" + _TEST.format(test="mode == 'p'")),
    _case(
        "modes set by statements",
        SPAN,
        "if len(input_ids) > 1:\n    mode = 'p'\nelse:\n    mode = 'd'" + _TEST.format(test="mode == 'p'"),
    ),
    _case("early return", SPAN, "if input_ids.shape[0] == 1:\n    return self.decode(info)\nreturn self.prefill(info)"),
    _case(
        "the field is read and not used",
        SPAN,
        "is_prefill = info['_omni_is_prefill']" + _TEST.format(test="len(input_ids) > 1"),
    ),
    _case(
        "the span first, the field later",
        SPAN,
        """
        if input_ids.shape[0] == 1:
            return input_ids, info["next"], {}
        if info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {}
        return input_ids, input_embeds, {}
        """,
    ),
    _case("a method", SPAN, _TEST.format(test="self.many(input_ids)"), "def many(self, x):\n    return x.shape[0] > 1"),
    _case(
        "a static method",
        SPAN,
        _TEST.format(test="self.many(input_ids)"),
        "@staticmethod\ndef many(x):\n    return x.shape[0] > 1",
    ),
    _case(
        "length through a helper",
        SPAN,
        _TEST.format(test="self.count(input_ids) > 1"),
        "def count(self, x):\n    return len(x)",
    ),
    _case(
        "a decorated helper",
        SPAN,
        _TEST.format(test="self.many(input_ids)"),
        "@torch.inference_mode()\ndef many(self, x):\n    return x.shape[0] > 1",
    ),
    _case(
        "a property",
        SPAN,
        "self.ids = input_ids" + _TEST.format(test="self.many"),
        "@property\ndef many(self):\n    return self.ids.shape[0] > 1",
    ),
    _case("an attribute", SPAN, "self.many = input_ids.shape[0] > 1" + _TEST.format(test="self.many")),
    _case(
        "an attribute that is read elsewhere",
        SPAN,
        "self.many = len(input_ids) > 1\nreturn input_ids, input_embeds, {}",
    ),
    _case("kept by request", SPAN, "self.many[info['request_id']] = len(input_ids) > 1\nreturn input_ids, None, {}"),
    _case("a global", SPAN, "global MANY\nMANY = len(input_ids) > 1\nreturn input_ids, input_embeds, {}"),
    _case("a partial call", SPAN, "return functools.partial(self.rows, len(input_ids) > 1)(info)"),
    _case("an argument of a layer", SPAN, "return self.talker.embed(input_ids, prefill=len(input_ids) > 1)"),
    _case("a nested function", SPAN, "def many():\n    return len(input_ids) > 1" + _TEST.format(test="many()")),
    _case("a dispatch by index", SPAN, "return [self.decode, self.prefill][len(input_ids) > 1](input_ids, info)"),
    _case("a dispatch by key", SPAN, "return {True: self.prefill, False: self.decode}[len(input_ids) > 1](info)"),
    _case("a dispatch with a default", SPAN, "return {1: self.decode}.get(len(input_ids), self.prefill)(info)"),
    _case("a short circuit", SPAN, "len(input_ids) > 1 and self.prefill(info)\nreturn input_ids, input_embeds, {}"),
    _case(
        "kept in a list", SPAN, "self.rows.append((info['request_id'], len(input_ids) > 1))\nreturn input_ids, None, {}"
    ),
    _case(
        "match",
        SPAN,
        """
        match input_ids.shape[0]:
            case 1:
                return self.decode(info)
            case _:
                return self.prefill(info)
        """,
    ),
    _case(
        "a branch that only changes state",
        SPAN,
        "if input_ids.shape[0] > 1:\n    info['steps']['count'] = 0\nreturn input_ids, input_embeds, {}",
    ),
    _case(
        "async",
        SPAN,
        """
        class M:
            async def preprocess(self, input_ids, input_embeds, **info):
                if await self.many(input_ids):
                    return self.prefill(info)
                return self.decode(info)

            async def many(self, ids):
                return ids.shape[0] > 1
        """,
    ),
    _case(
        "a decorated hook",
        SPAN,
        """
        class M:
            @torch.inference_mode()
            def preprocess(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)
        """,
    ),
    _case(
        "all by keywords",
        SPAN,
        """
        class M:
            def preprocess(self, **kwargs):
                ids = kwargs["input_ids"]
                return self.prefill(kwargs) if ids.shape[0] > 1 else self.decode(kwargs)
        """,
    ),
    _case(
        "by position",
        SPAN,
        """
        class M:
            def preprocess(self, token_ids, embeds, **kwargs):
                return self.prefill(kwargs) if token_ids.shape[0] > 1 else self.decode(kwargs)
        """,
    ),
    _case(
        "a hook set by the class",
        SPAN,
        """
        class M(nn.Module):
            def __init__(self):
                self.set_custom_preprocess(self.mine)

            def mine(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)
        """,
    ),
    _case(
        "a hook assigned",
        SPAN,
        """
        class M(nn.Module):
            def __init__(self):
                self.preprocess = self.mine

            def mine(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)
        """,
    ),
    _case(
        "a hook set by name",
        SPAN,
        """
        class M(nn.Module):
            def __init__(self):
                setattr(self, "preprocess", self.mine)

            def mine(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)
        """,
    ),
    _case(
        "a hook set by keyword",
        SPAN,
        """
        class M(nn.Module):
            def __init__(self):
                self.set_custom_preprocess(preprocess_fn=torch.compile(self.mine))

            def mine(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)
        """,
    ),
    _case(
        "a function for a hook",
        SPAN,
        """
        def mine(input_ids, input_embeds, **info):
            return prefill(info) if len(input_ids) > 1 else decode(info)

        class M(nn.Module):
            def __init__(self):
                self.set_custom_preprocess(mine)
        """,
    ),
    _case(
        "a hook by another name of the class",
        SPAN,
        """
        class M(nn.Module):
            def mine(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)

            preprocess = mine
        """,
    ),
    _case(
        "an inherited hook and an overridden helper",
        SPAN,
        """
        class Base:
            def preprocess(self, input_ids, input_embeds, **info):
                return self.prefill(info) if self.reads_prompt(input_ids, info) else self.decode(info)

            def reads_prompt(self, ids, info):
                return info["_omni_is_prefill"]

        class M(Base):
            def reads_prompt(self, ids, info):
                return len(ids) > 1
        """,
    ),
    _case(
        "super",
        SPAN,
        """
        class Base:
            def preprocess(self, input_ids, input_embeds, **info):
                return self.prefill(info) if len(input_ids) > 1 else self.decode(info)

        class M(Base):
            def preprocess(self, input_ids, input_embeds, **info):
                return super().preprocess(input_ids, input_embeds, **info)
        """,
    ),
    _case(
        "a dataclass",
        SPAN,
        """
        @dataclass
        class Row:
            ids: object
            many: bool

            @classmethod
            def of(cls, ids):
                return cls(ids, many=len(ids) > 1)

        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                row = Row.of(input_ids)
                if row.many:
                    return self.prefill(info)
                return self.decode(info)
        """,
    ),
    _case(
        "a module's constant",
        SPAN,
        """
        ONE = 1

        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return self.decode(info) if len(input_ids) == ONE else self.prefill(info)
        """,
    ),
    _case(
        "postprocess",
        SPAN,
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def postprocess(self, hidden_states, **info):
                if hidden_states.shape[0] > 1:
                    return {}
                return {"last": hidden_states}
        """,
    ),
    *_tests(
        SPAN,
        rows_one_by_one="len([each for each in input_ids]) > 1",
        rows_counted="sum(1 for _ in input_ids) > 1",
        numbered_rows="[at for at, _ in enumerate(input_ids)][-1] > 0",
        the_last_of_a_list="list(enumerate(input_ids.tolist()))[-1][0] != 0",
        zipped="len(list(zip(input_ids, input_embeds))) == 1",
        formatted="f'{len(input_ids)}' != '1'",
        looked_up="{'1': False}.get(f'{len(input_ids)}', True)",
    ),
    _case("a head and a rest", SPAN, "head, *rest = input_ids" + _TEST.format(test="rest")),
    _case("all but the last", SPAN, "*rest, last = input_ids.tolist()" + _TEST.format(test="len(rest) > 0")),
    _case(
        "the last number of a loop",
        SPAN,
        "for at, token in enumerate(input_ids):\n    last = at" + _TEST.format(test="last > 0"),
    ),
    *[
        _case(
            f"a shape that is matched: {pattern}",
            SPAN,
            f"""
            match input_ids.shape:
                case {pattern}:
                    return self.decode(info)
                case _:
                    return self.prefill(info)
            """,
        )
        for pattern in ("(1,)", "[1]", "(1 as n,)", "(n,) if n == 1", "(n, *_) if n < 2", "[0] | [1]", "(1, *_)")
    ],
    *[
        _case(
            f"an attempt: {attempt}",
            SPAN,
            f"""
            try:
                {attempt}
            except (RuntimeError, ValueError):
                return self.prefill(input_ids, info)
            return self.decode(token, info)
            """,
        )
        for attempt in (
            "token = input_ids.item()",
            "token = int(input_ids)",
            "token = input_ids.view(1)",
            "(token,) = input_ids",
            "[token] = input_ids.tolist()",
        )
    ],
    *[
        _case(f"a method by name: {name}", SPAN, f"return getattr(self, {name})(input_ids, info)")
        for name in (
            'f"step_{min(len(input_ids), 2)}"',
            "'prefill' if len(input_ids) > 1 else 'decode'",
            "'step_' + str(len(input_ids) > 1)",
            "['decode', 'prefill'][int(len(input_ids) > 1)]",
            "'_step_%s' % ('many' if len(input_ids) > 1 else 'one')",
            "'step_{}'.format(len(input_ids) > 1)",
        )
    ],
    # -- the span guesses behind the fields
    *_tests(
        GUESS,
        a_default="info.get('_omni_is_prefill', len(input_ids) > 1)",
        a_default_by_name="info.get('_omni_is_prefill', default=len(input_ids) > 1)",
        a_conditional="info['_omni_is_prefill'] if '_omni_is_prefill' in info else len(input_ids) > 1",
        set_if_missing="info.setdefault('_omni_is_prefill', len(input_ids) > 1)",
        popped="info.pop('_omni_is_prefill', len(input_ids) > 1)",
    ),
    _case(
        "the alias of the keywords",
        GUESS,
        "payload = info\nmeta = payload.copy()" + _TEST.format(test="meta.get('_omni_is_prefill', len(input_ids) > 1)"),
    ),
    _case(
        "merged keywords",
        GUESS,
        """
        merged = {k: v for k, v in info.items() if k != "extra"}
        for k, v in info["extra"].items():
            merged.setdefault(k, v)
        """
        + textwrap.indent(_TEST.format(test="merged.get('_omni_is_prefill', len(input_ids) > 1)"), " " * 8),
    ),
    _case(
        "no bool",
        GUESS,
        """
        raw = info.get("_omni_is_prefill")
        prefill = raw if isinstance(raw, bool) else input_ids.numel() > 1
        return self.prefill(info) if prefill else self.decode(info)
        """,
    ),
    _case(
        "None",
        GUESS,
        """
        raw = info.get("_omni_is_prefill")
        if raw is None:
            raw = input_ids.numel() > 1
        return self.prefill(info) if raw else self.decode(info)
        """,
    ),
    _case(
        "an exception",
        GUESS,
        """
        try:
            prefill = int(info["_omni_num_computed_tokens"]) < int(info["_omni_prompt_len"])
        except KeyError:
            prefill = input_ids.shape[0] > 1
        return self.prefill(info) if prefill else self.decode(info)
        """,
    ),
    _case(
        "in a helper",
        GUESS,
        _TEST.format(test="self.reads_prompt(input_ids, **info)"),
        "def reads_prompt(self, ids, _omni_is_prefill=None, **_):\n"
        "    return ids.shape[0] > 1 if _omni_is_prefill is None else _omni_is_prefill",
    ),
    _case(
        "a long decode span",
        "span-beside-phase fallback",
        _TEST.format(test="info['_omni_is_prefill'] or input_ids.shape[0] > 1"),
    ),
    # -- the progress decides, and not as the phase
    *_tests(
        PROGRESS,
        first_chunk="info['_omni_num_computed_tokens'] == 0",
        first_chunk_as_a_number="not info['_omni_num_computed_tokens']",
        later_chunks="not info['_omni_num_computed_tokens'] > 0",
        first_chunk_or_no_state="info['_omni_num_computed_tokens'] == 0 or 'state' not in info",
        not_the_last_chunk="info['_omni_num_computed_tokens'] + len(input_ids) < info['_omni_prompt_len']",
        what_is_left="info['_omni_prompt_len'] - info['_omni_num_computed_tokens'] > input_ids.shape[0]",
    ),
    _case(
        "a first chunk in a helper",
        PROGRESS,
        _TEST.format(test="self.begins(**info)"),
        "def begins(self, _omni_num_computed_tokens, **_):\n    return int(_omni_num_computed_tokens) == 0",
    ),
    # -- a counter of its own
    _case(
        "a counter in the updates",
        COUNTER,
        """
        start = int(info.get("offset", 0) or 0)
        rows = info["prompt"][start : start + input_ids.shape[0]]
        return input_ids, rows, {"offset": start + input_ids.shape[0]}
        """,
    ),
    _case(
        "a nested counter",
        COUNTER,
        """
        span = len(input_ids)
        meta = info.get("meta", {})
        first = max(0, min(meta.get("done", 0), 100))
        last = min(first + span, 100)
        return input_ids, info["prompt"][first:last], {"meta": {"done": first + span}}
        """,
    ),
    _case(
        "a counter kept by hand",
        COUNTER,
        """
        state = self.states[info["request_id"]]
        rows = state.prompt[state.done : state.done + len(input_ids)]
        state.done += len(input_ids)
        return input_ids, rows, {}
        """,
    ),
    _case(
        "a counter of the model",
        COUNTER,
        """
        rows = self.prompt[self.done : self.done + len(input_ids)]
        self.done = self.done + len(input_ids)
        return input_ids, rows, {}
        """,
    ),
    _case(
        "a counter in a helper",
        COUNTER,
        "return self.take(info, info.get('done', 0), input_ids)",
        """
        def take(self, info, start, ids):
            end = start + ids.numel()
            return ids, info["prompt"][start:end], {"done": end}
        """,
    ),
    _case(
        "two slices",
        COUNTER,
        """
        start = info.get("done", 0)
        rows = info["prompt"][start:][: len(input_ids)]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "narrow",
        COUNTER,
        """
        start = info.get("done", 0)
        rows = info["prompt"].narrow(0, start, len(input_ids))
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "torch.narrow",
        COUNTER,
        """
        start = info.get("done", 0)
        rows = torch.narrow(info["prompt"], 0, start, len(input_ids))
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "an index",
        COUNTER,
        """
        start = info.get("done", 0)
        rows = info["prompt"][torch.arange(start, start + len(input_ids))]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "a counter that postprocess advances",
        COUNTER,
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                at = info["done"]
                return input_ids, info["prompt"][at : at + len(input_ids)], {}

            def postprocess(self, hidden_states, **info):
                return {"done": info["done"] + hidden_states.shape[0]}
        """,
    ),
    *[
        _case(
            f"a counter: {rows}",
            COUNTER,
            f"""
            meta = info.get("meta") or {{"done": 0}}
            start = meta["done"]
            rows = {rows}
            meta["done"] += len(input_ids)
            return input_ids, rows, {{"meta": meta}}
            """,
            "def rows(self, prompt, start, n):\n    return prompt[start : start + n]",
        )
        for rows in (
            "self.rows(info['prompt'], start, len(input_ids))",
            "info['prompt'][slice(start, start + len(input_ids))]",
            "info['prompt'][list(range(start, start + len(input_ids)))]",
            "info['prompt'].index_select(0, torch.arange(start, start + len(input_ids)))",
        )
    ],
    _case(
        "a prompt that is consumed",
        COUNTER,
        """
        prompt = info["prompt"]
        n = len(input_ids)
        return input_ids, prompt[:n], {"prompt": prompt[n:]}
        """,
    ),
    _case(
        "a counter beside the field",
        "own-counter fallback",
        """
        if not info["_omni_is_prefill"]:
            return input_ids, info["next"].reshape(1, -1), {}
        start = info.get("done", 0)
        rows = info["prompt"][start : start + len(input_ids)]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "a counter beside a field that decides nothing",
        COUNTER,
        """
        prefill = info["_omni_is_prefill"]
        start = info.get("done", 0)
        rows = info["prompt"][start : start + len(input_ids)]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "a counter for some requests",
        f"own-counter fallback, {UNKNOWN}",
        """
        start = info.get("done", 0)
        if not info["resumable"]:
            start = info["_omni_num_computed_tokens"]
        rows = info["prompt"][start : start + len(input_ids)]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    _case(
        "a counter for a missing field",
        f"own-counter fallback, {CROSSING}",
        """
        start = info.get("_omni_num_computed_tokens", info.get("done", 0))
        rows = info["prompt"][start : start + len(input_ids)]
        return input_ids, rows, {"done": start + len(input_ids)}
        """,
    ),
    # -- the runner's fields
    *[
        _case(f"stored: {statement}", FIELD, f"{statement}\nreturn input_ids, input_embeds, {{}}")
        for statement in (
            "info['_omni_is_prefill'] = False",
            "info['_omni_num_computed_tokens'] += 1",
            "payload = info; payload['_omni_prompt_len'] = 3",
            "info.update({'_omni_is_prefill': False})",
            "info.update(_omni_is_prefill=False)",
            "info.__setitem__('_omni_is_prefill', False)",
            "for key in ('_omni_is_prefill', '_omni_prompt_len'): info[key] = 0",
            "info |= {'_omni_is_prefill': False}",
            "info = {**info, '_omni_is_prefill': False}",
            "info = info | {'_omni_is_prefill': False}",
            "info = dict(info, _omni_is_prefill=False)",
            "key = '_omni_' + 'is_prefill'; info[key] = False",
        )
    ],
    _case("returned", FIELD, "return input_ids, input_embeds, {'_omni_prompt_len': 4}"),
    _case("returned by dict", FIELD, "return input_ids, input_embeds, dict(_omni_prompt_len=4)"),
    _case("returned later", FIELD, "out = {}\nout['_omni_prompt_len'] = 4\nreturn input_ids, input_embeds, out"),
    _case("returned if missing", FIELD, "out = {}\nout.setdefault('_omni_prompt_len', 4)\nreturn input_ids, None, out"),
    _case(
        "in a batch",
        FIELD,
        """
        class M:
            def preprocess_decode_batch(self, *, input_ids, req_infos):
                for info in req_infos:
                    info["_omni_is_prefill"] = False
                return input_ids, self.embed(input_ids), [{} for _ in req_infos]
        """,
    ),
    _case(
        "removed in a batch",
        FIELD,
        """
        class M:
            def preprocess_decode_batch(self, *, input_ids, req_infos):
                for row, info in enumerate(req_infos):
                    info.pop("_omni_is_prefill", None)
                return input_ids, self.embed(input_ids), [{} for _ in req_infos]
        """,
    ),
    _case(
        "deleted in a batch",
        FIELD,
        """
        class M:
            def preprocess_decode_batch(self, *, input_ids, req_infos):
                for info in req_infos:
                    del info["_omni_is_prefill"]
                return input_ids, self.embed(input_ids), [{} for _ in req_infos]
        """,
    ),
    _case(
        "returned from a batch",
        FIELD,
        """
        class M:
            def preprocess_decode_batch(self, *, input_ids, req_infos):
                return input_ids, self.embed(input_ids), [{"_omni_is_prefill": False} for _ in req_infos]
        """,
    ),
    _case(
        "in preprocess_batch",
        FIELD,
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def preprocess_batch(self, *, req_ids, model_intermediate_buffer, device):
                for name in req_ids:
                    model_intermediate_buffer[name]["_omni_prompt_len"] = 7
        """,
    ),
    _case(
        "from postprocess",
        FIELD,
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def postprocess(self, hidden_states, **info):
                return {"_omni_is_prefill": False}
        """,
    ),
    # -- the whole prompt
    _case("the whole prompt, sliced from end to end", WHOLE, "return input_ids, info['prompt_embeds'][:], {}"),
    _case(
        "the whole prompt of the model",
        WHOLE,
        "return input_ids, self.prompts[info['request_id']].to(input_embeds), {}",
    ),
    _case("the whole prompt", WHOLE, "return input_ids, info['prompt_embeds'], {}"),
    _case(
        "the whole prompt in prefill",
        WHOLE,
        """
        if info["_omni_is_prefill"]:
            return input_ids, self.build(info["text"]), {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    _case(
        "the whole prompt at first",
        f"{WHOLE}, {PROGRESS}",
        """
        if info["_omni_num_computed_tokens"] == 0:
            return input_ids, torch.cat([info["voice"], info["text"]]), {}
        return input_ids, input_embeds, {}
        """,
    ),
    _case(
        "the whole prompt or an error",
        "whole-prompt note",
        """
        if info["_omni_is_prefill"]:
            rows = info["embeds"].to(input_ids.device)
            if rows.shape[0] != len(input_ids):
                raise ValueError("no chunks")
            return input_ids, rows, {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    _case(
        "the whole prompt or an error of a helper",
        "whole-prompt note",
        """
        if info["_omni_is_prefill"]:
            rows = info["embeds"]
            self.same(rows.shape[0], len(input_ids))
            return input_ids, rows, {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
        "def same(self, a, b):\n    if a == b:\n        return\n    raise ValueError('no chunks')",
    ),
    _case(
        "the whole prompt or an error for one of two reasons",
        "whole-prompt note",
        """
        if info["_omni_is_prefill"]:
            rows = info["embeds"]
            if rows.ndim != 2 or rows.shape[0] != len(input_ids):
                raise ValueError("no chunks")
            return input_ids, rows, {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    _case(
        "the whole prompt or an assertion",
        "whole-prompt note",
        """
        if info["_omni_is_prefill"]:
            rows = info["embeds"]
            assert rows.shape[0] == len(input_ids)
            return input_ids, rows, {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    # -- a span that goes beyond the prompt
    _case(
        "the runner's progress",
        CROSSING,
        """
        start = info["_omni_num_computed_tokens"]
        end = start + len(input_ids)
        return input_ids, info["prompt"][start:end], {"prompt": info["prompt"], "end": end}
        """,
    ),
    _case(
        "the runner's progress over a counter",
        CROSSING,
        """
        meta = info.setdefault("meta", {})
        meta["done"] = int(info["_omni_num_computed_tokens"])
        rows = info["prompt"][meta["done"] : meta["done"] + len(input_ids)]
        return input_ids, rows, {"meta": {"done": meta["done"] + len(input_ids)}}
        """,
    ),
    *[
        _case(
            f"the prompt's rows only: {rows}",
            CROSSING,
            f"""
            start, span, length = info["_omni_num_computed_tokens"], len(input_ids), info["_omni_prompt_len"]
            prompt = info["prompt"]
            if not info["_omni_is_prefill"]:
                return input_ids, self.embed(input_ids), {{}}
            return input_ids, {rows}, {{"prompt": prompt}}
            """,
            "def rows(self, prompt, start, n):\n    return prompt[start : start + n].to(self.dtype)",
        )
        for rows in (
            "prompt[start : min(start + span, length)]",
            "prompt[start : min(start + span, prompt.shape[0])]",
            "prompt[start:]",
            "prompt[start:][:span]",
            "prompt[:length][start : start + span]",
            "self.norm(prompt[start : start + span])",
            "self.rows(prompt, start, span)",
            "self.embed(input_ids[: length - start])",
        )
    ],
    # -- what the fields do not choose, as far as can be seen
    *_tests(
        UNKNOWN,
        first_call="'state' not in info",
        by_token="input_ids[0] == self.audio_token",
        placeholder_ids="(input_ids == self.placeholder).all()",
        by_a_library="np.count_nonzero(input_ids) > 1",
        codes_are_stored="info.get('codes') is not None",
        codes_of_the_model="info['request_id'] in self.codes",
        codes_are_many="info['codes'].shape[0] > 1",
        nothing_generated="info['generated_len'] == 0",
        nothing_generated_as_a_number="not info.get('generated_len', 0)",
        an_offset="info.get('duplex_token_offset', 0) > 0",
        an_object_of_the_request="self.states[info['request_id']].started",
        a_length_that_is_no_phase="info['_omni_prompt_len'] > 7",
        empty="input_ids.shape[0] == 0",
    ),
    *[
        _case(
            f"a flag of the first chunk: {test}",
            UNKNOWN,
            f"""
            started = {test}
            {store}
            if started:
                return input_ids, self.embed(input_ids), {{}}
            return input_ids, input_embeds, {{}}
            """,
        )
        for test, store in {
            "self.started": "self.started = True",
            "getattr(self, 'started', False)": "setattr(self, 'started', True)",
            "hasattr(self, 'started')": "self.started = True",
            "self.calls > 1": "self.calls += 1",
            "1 in self.seen": "self.seen.append(1)",
            "self.seen": "self.seen[0] = True",
        }.items()
    ],
    _case(
        "rows by a flag",
        UNKNOWN,
        """
        rows = input_embeds
        if info["started"]:
            rows = self.embed(input_ids)
        return input_ids, rows, {"started": True}
        """,
    ),
    _case(
        "stored codes before the phase",
        UNKNOWN,
        """
        if info.get("codes") is not None:
            return input_ids, self.codebook(info["codes"]), {}
        if info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    _case(
        "stored codes beside a position",
        UNKNOWN,
        """
        at = self.positions(info["_omni_num_computed_tokens"])
        if "codes" in info:
            return input_ids, self.codebook(info["codes"]), {}
        return input_ids, self.embed(input_ids) + at, {}
        """,
    ),
    _case(
        "an attempt at stored codes",
        UNKNOWN,
        """
        try:
            codes = info["codes"]
        except KeyError:
            return input_ids, self.embed(input_ids), {}
        return input_ids, self.codebook(codes), {}
        """,
    ),
    _case(
        "an attempt at a state of its own",
        UNKNOWN,
        """
        try:
            self.past
        except AttributeError:
            self.past = 1
            return input_ids, self.embed(input_ids), {}
        return input_ids, self.audio(input_ids), {}
        """,
    ),
    _case(
        "a first call in a helper",
        UNKNOWN,
        "return self.rows(input_ids, info)",
        "def rows(self, ids, info):\n    if info.get('codes') is None:\n        return ids, self.embed(ids), {}\n"
        "    return ids, self.head(ids), {}",
    ),
    _case(
        "a loop that returns at its second row",
        UNKNOWN,
        """
        for at, token in enumerate(input_ids):
            if at > 0:
                return self.prefill(input_ids, info)
        return self.decode(input_ids, info)
        """,
    ),
    *[
        _case(f"chosen by stored codes: {rows}", UNKNOWN, f"return input_ids, {rows}, {{}}")
        for rows in (
            "self.audio(input_ids) if info.get('codes') else self.embed(input_ids)",
            "info.get('codes') and self.audio(input_ids) or self.embed(input_ids)",
            "[self.embed, self.audio][info['generated_len'] > 0](input_ids)",
            "{True: self.audio, False: self.embed}[bool(info.get('codes'))](input_ids)",
            "getattr(self, info['mode'])(input_ids)",
            "torch.where(torch.tensor(bool(info.get('codes'))), self.audio(input_ids), self.embed(input_ids))",
            "next((self.audio(input_ids) for code in info.get('codes', [])), self.embed(input_ids))",
            "self.audio(input_ids) if isinstance(info.get('state'), dict) else self.embed(input_ids)",
        )
    ],
    *[
        _case(
            f"chosen by a statement: {choice.replace(chr(10), '; ')}",
            UNKNOWN,
            f"""
            rows = self.embed(input_ids)
{textwrap.indent(choice, " " * 12)}
                rows = self.audio(input_ids)
            return input_ids, rows, {{}}
            """,
        )
        for choice in (
            "while info.get('codes'):",
            "for code in info.get('codes', []):",
            "self.calls += 1\nif self.calls > 1:",
            "global STARTED\nif STARTED:",
            "started = hasattr(self, 'past')\nself.past = 1\nif started:",
        )
    ],
    *[
        _case(
            f"matched: {subject}",
            UNKNOWN,
            f"""
            match {subject}:
                case {pattern}:
                    return input_ids, self.embed(input_ids), {{}}
                case _:
                    return input_ids, self.audio(input_ids), {{}}
            """,
        )
        for subject, pattern in (("info.get('generated_len', 0)", "0"), ("info", "{'codes': None}"))
    ],
    _case(
        "a flag that forward sets",
        UNKNOWN,
        """
        class M:
            def __init__(self):
                self.decodes, self.stage = False, "talker"

            def preprocess(self, input_ids, input_embeds, **info):
                rows = self.audio(input_ids) if self.decodes else self.embed(input_ids)
                return input_ids, rows, {}

            def forward(self, input_ids, **kwargs):
                self.decodes = True
        """,
    ),
    _case(
        "rows for which the walk comes to no end",
        UNKNOWN,
        """
        rows = self.embed(input_ids)
        with suppress(RuntimeError):
            input_ids.item()
            rows = self.audio(input_ids)
        return input_ids, rows, {}
        """,
    ),
    _case("rows that are kept", UNKNOWN, "return input_ids, info['next'].reshape(1, -1), {}"),
    _case(
        "an offset of the runner's",
        UNKNOWN,
        """
        at = info["duplex_token_offset"]
        return input_ids, info["prompt"][at : at + len(input_ids)], {"length": len(input_ids)}
        """,
    ),
    _case(
        "passed on", UNKNOWN, "return self.talker.preprocess(input_ids=input_ids, input_embeds=input_embeds, **info)"
    ),
    _case(
        "a counter that is a length",
        UNKNOWN,
        """
        seen = self.seen[info["request_id"]]
        rows = info["prompt"][len(seen) : len(seen) + len(input_ids)]
        seen.extend(input_ids.tolist())
        return input_ids, rows, {}
        """,
    ),
    # -- mtp_inputs in prefill
    _case("always", MTP, "return input_ids, input_embeds, {'mtp_inputs': (self.zero, self.zero)}"),
    _case("by dict", MTP, "return input_ids, input_embeds, dict(mtp_inputs=(self.zero, self.zero))"),
    _case(
        "in the prefill branch",
        MTP,
        """
        updates = {}
        if info["_omni_is_prefill"]:
            updates["mtp_inputs"] = (self.zero, self.zero)
        return input_ids, input_embeds, updates
        """,
    ),
    _case(
        "by the package's own name",
        MTP,
        """
        from omni_npu_phase.contract import IS_PREFILL, MTP_INPUTS

        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                if info[IS_PREFILL]:
                    return input_ids, input_embeds, {MTP_INPUTS: (self.zero, self.zero)}
                return input_ids, input_embeds, {}
        """,
    ),
    # -- notes
    _case("all keywords", "returned-keywords note", "return input_ids, input_embeds, info"),
    _case("all keywords and more", "returned-keywords note", "return input_ids, input_embeds, {**info, 'x': 1}"),
    _case("a constant default", "field-default note", _TEST.format(test="info.get('_omni_is_prefill', False)")),
    # -- nothing
    _case(
        "positions of one row made faster",
        "",
        """
        if input_ids.shape[0] == 1:
            positions = torch.tensor([info["_omni_num_computed_tokens"]])
        else:
            start = info.get("_omni_num_computed_tokens")
            positions = torch.arange(start, start + input_ids.shape[0])
        if info["_omni_is_prefill"]:
            return self.prefill(input_ids, positions)
        return self.decode(input_ids, positions)
        """,
    ),
    *[
        _case(
            f"as many rows as the span: {rows.replace(chr(10), '; ')}",
            "",
            f"""
            start, span, length = info["_omni_num_computed_tokens"], len(input_ids), info["_omni_prompt_len"]
            prompt = info["prompt"]
{textwrap.indent(rows, " " * 12)}
            return input_ids, rows, {{"prompt": prompt}}
            """,
        )
        for rows in (
            "rows = torch.cat([prompt[start : start + span], self.embed(input_ids[length - start :])])",
            "rows = prompt[start : start + span]\nrows = F.pad(rows, (0, 0, 0, span - rows.shape[0]))",
            "rows = prompt[start : start + span]\nif rows.shape[0] < span:\n    rows = self.fill(rows, input_ids)",
            "rows = prompt[start : start + span]\nif len(rows) != span:\n    raise ValueError('not all rows')",
            "rows = prompt[start : start + span]\nassert len(rows) == span",
            "if start + span > length:\n    raise ValueError('beyond')\nrows = prompt[start : start + span]",
            "rows = prompt[start : start + span] if start + span <= length else self.all(prompt, input_ids)",
            "rows = self.embed(input_ids)\nif start + span <= len(prompt):\n    rows = prompt[start : start + span]",
        )
    ],
    *[
        _case(f"the phase chooses: {chosen}", "", f"prefill = info['_omni_is_prefill']\nreturn {chosen}")
        for chosen in (
            "(self.a if prefill else self.b)(input_ids, info)",
            "[self.b, self.a][prefill](input_ids, info)",
            "{True: self.a, False: self.b}[prefill](input_ids, info)",
            "{False: self.b}.get(prefill, self.a)(input_ids, info)",
            "getattr(self, 'a' if prefill else 'b')(input_ids, info)",
            "getattr(self, f'step_{int(prefill)}')(input_ids, info)",
            "prefill and self.a(info) or self.b(info)",
            "(input_ids, self.step(info['rows'], prefill=prefill), {})",
        )
    ],
    _case(
        "the phase is matched",
        "",
        """
        match info["_omni_is_prefill"]:
            case True:
                return self.a(info)
            case False:
                return self.b(info)
        """,
    ),
    _case(
        "rows by the phase",
        "",
        """
        one, other = self.rows(info["text"])[info["_omni_num_computed_tokens"] :][: len(input_ids)], info["next"]
        rows = self.fill(one, input_ids) if info["_omni_is_prefill"] else other
        return input_ids, rows, {}
        """,
    ),
    _case(
        "the phase, or a request that is new",
        "",
        """
        if info["_omni_is_prefill"] or "state" not in info:
            return input_ids, self.embed(input_ids), {"state": self.begin(info)}
        return input_ids, info["state"].next, {}
        """,
    ),
    _case(
        "a progress compared with a length of the model's",
        "",
        """
        session = self.sessions.get(info["request_id"])
        if session is None:
            session = self.sessions[info["request_id"]] = self.begin(info)
        if info["_omni_num_computed_tokens"] < session["length"]:
            return input_ids, self.prefill(session, info), {}
        return input_ids, session["next"], {}
        """,
    ),
    *[
        _case(f"no phase: {rows}", "", f"return input_ids, {rows}, {{}}")
        for rows in (
            "self.embed(input_ids)",
            "input_embeds if input_embeds is not None else self.embed(input_ids)",
            "torch.where((input_ids == self.pad)[:, None], self.zero, self.embed(input_ids))",
            "self.embed(input_ids) + self.positions[info['_omni_num_computed_tokens']]",
            "self.many(input_ids) if self.stage == 'talker' else self.embed(input_ids)",
        )
    ],
    _case(
        "a progress for each row",
        "",
        """
        rows = []
        for at in range(len(input_ids)):
            reads = info["_omni_num_computed_tokens"] + at < info["_omni_prompt_len"]
            rows.append(self.text(input_ids[at]) if reads else self.audio(input_ids[at]))
        return input_ids, torch.stack(rows), {}
        """,
    ),
    _case(
        "a voice that is there or not, inside prefill",
        "",
        """
        if not info["_omni_is_prefill"]:
            return input_ids, self.audio(input_ids), {}
        rows = self.text(input_ids)
        if info.get("voice") is not None:
            rows = rows + self.voice(info["voice"])
        return input_ids, rows, {}
        """,
    ),
    _case(
        "a prompt's part put into rows of the span",
        "",
        """
        start, span = info["_omni_num_computed_tokens"], len(input_ids)
        rows = self.embed(input_ids)
        if info["_omni_is_prefill"]:
            part = info["prompt"][start : start + span]
            rows[: len(part)] = part
        return input_ids, rows, {}
        """,
    ),
    _case(
        "a device that is kept",
        "",
        "return input_ids, self.embed(input_ids.to(self.place())), {}",
        "def place(self):\n    if self.device is None:\n        self.device = self.weight.device\n"
        "    return self.device",
    ),
    _case(
        "no phase: a model's own stage, and a number that is tried",
        "",
        """
        try:
            speed = self.speed_of(self.config)
        except (TypeError, ValueError):
            speed = 1.0
        if self.stage == "talker":
            return input_ids, self.embed(input_ids) * speed, {}
        for at, token in enumerate(input_ids):
            self.count(at)
        return input_ids, input_embeds, {}
        """,
    ),
    *_tests(
        "",
        the_field="info['_omni_is_prefill']",
        the_field_by_get="info.get('_omni_is_prefill')",
        the_field_by_get_of_an_alias="(payload := info).get('_omni_is_prefill')",
        the_lengths="info['_omni_num_computed_tokens'] < info['_omni_prompt_len']",
        the_lengths_in_the_other_order="info['_omni_prompt_len'] > int(info['_omni_num_computed_tokens'])",
    ),
    _case(
        "a required span",
        "",
        "if input_ids.shape[0] != 1:\n    raise ValueError('one token')\nreturn input_ids, None, {}",
    ),
    _case("an asserted span", "", "assert input_ids.shape[0] == 1\nreturn input_ids, input_embeds, {}"),
    _case("a log", "", "if len(input_ids) > 1:\n    logger.debug('many')\nreturn input_ids, input_embeds, {}"),
    _case("a logged test", "", "logger.debug('%s', len(input_ids) > 1)\nreturn input_ids, input_embeds, {}"),
    _case(
        "a shape",
        "",
        "rows = input_embeds\nif len(input_ids) == 1:\n    rows = rows.reshape(1, -1)\nreturn input_ids, rows, {}",
    ),
    _case(
        "a shape in an expression",
        "",
        "rows = input_embeds.unsqueeze(0) if len(input_ids) == 1 else input_embeds\nreturn input_ids, rows, {}",
    ),
    _case("an expanded row", "", "rows = input_embeds.expand(len(input_ids), -1)\nreturn input_ids, rows, {}"),
    _case(
        "a span inside prefill",
        "",
        """
        if info["_omni_is_prefill"]:
            if len(input_ids) > 1:
                return input_ids, self.many(input_ids), {}
            return input_ids, self.one(input_ids), {}
        return input_ids, info["next"].reshape(1, -1), {}
        """,
    ),
    _case(
        "a long span inside decode",
        "",
        """
        if info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {}
        if len(input_ids) > 1:
            return input_ids, self.embed(input_ids), {}
        return input_ids, info["next"].reshape(1, -1), {"mtp_inputs": (info["last"], self.zero)}
        """,
    ),
    _case(
        "MTP for one decode token",
        "",
        """
        updates = {}
        if not info["_omni_is_prefill"] and len(input_ids) == 1:
            updates["mtp_inputs"] = (info["last"], self.zero)
        return input_ids, self.embed(input_ids), updates
        """,
    ),
    _case(
        "a helper that both phases share",
        "",
        """
        if info["_omni_is_prefill"]:
            return self.rows(input_ids)
        return self.rows(input_ids)
        """,
        "def rows(self, ids):\n    if ids.shape[0] > 1:\n        return ids, self.many(ids), {}\n"
        "    return ids, self.one(ids), {}",
    ),
    _case(
        "a first and a last chunk inside prefill",
        "",
        """
        start, span = info["_omni_num_computed_tokens"], len(input_ids)
        if start == 0:
            self.begin(info)
        else:
            self.go_on(info)
        last = {"last": info["last"]} if start + span == info["_omni_prompt_len"] else {"first": info["first"]}
        return (self.prefill if info["_omni_is_prefill"] else self.decode)(input_ids, last)
        """,
    ),
    _case(
        "a first chunk that begins a request",
        "",
        """
        if info["_omni_num_computed_tokens"] == 0:
            self.states[info["request_id"]] = self.begin(info)
        return input_ids, self.embed(input_ids), {}
        """,
    ),
    _case(
        "a last chunk that is told to others",
        "",
        """
        ends = info["_omni_num_computed_tokens"] + len(input_ids) >= info["_omni_prompt_len"]
        return input_ids, self.embed(input_ids, ends), {"ends": ends}
        """,
    ),
    _case(
        "hidden states from the prompt's end on",
        "",
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def postprocess(self, hidden_states, **info):
                if info["_omni_num_computed_tokens"] + len(hidden_states) < info["_omni_prompt_len"]:
                    return {}
                return {"last": hidden_states[-1]}
        """,
    ),
    _case(
        "the runner's progress, padded",
        "",
        """
        span = len(input_ids)
        if not info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {}
        start = max(0, int(info["_omni_num_computed_tokens"]) - self.prefix)
        rows = info["prompt"][start : start + span]
        if rows.shape[0] < span:
            rows = torch.cat([rows, self.pad.expand(span - rows.shape[0], -1)])
        return input_ids, rows, {"prompt": info["prompt"]}
        """,
    ),
    _case(
        "the runner's progress beside a statistic",
        "",
        """
        meta = info.get("meta", {})
        start = info["_omni_num_computed_tokens"]
        rows = torch.narrow(info["prompt"], 0, start, len(input_ids))
        return input_ids, rows, {"meta": {"tokens": meta.get("tokens", 0) + len(input_ids)}}
        """,
    ),
    _case(
        "frames that were not yet handed out",
        "",
        """
        state = self.states[info["request_id"]]
        new = state.frames[state.emitted :]
        state.emitted = len(state.frames)
        return input_ids, self.embed(input_ids), {"codes": new}
        """,
    ),
    _case(
        "windows inside the span",
        "",
        """
        for at in range(0, len(input_ids), 16):
            self.window(input_embeds[at : at + 16])
        return input_ids, input_embeds, {}
        """,
    ),
    _case(
        "the phase in a state of its own",
        "",
        """
        self.phase = info["_omni_is_prefill"]
        return self.prefill(info) if self.phase else self.decode(info)
        """,
    ),
    _case(
        "mtp_inputs by state",
        "",
        """
        updates = {}
        if isinstance(info.get("last"), torch.Tensor):
            updates["mtp_inputs"] = (info["last"], self.zero)
        return input_ids, self.embed(input_ids), updates
        """,
    ),
    _case(
        "a cursor of decode",
        "",
        """
        if info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {}
        at = info.get("cursor", 0)
        step = info["text"][at : at + 1]
        return input_ids, step + self.embed(input_ids), {"cursor": at + 1}
        """,
    ),
    _case(
        "a queue of decode",
        "",
        """
        if info["_omni_is_prefill"]:
            return input_ids, self.embed(input_ids), {"queue": self.queue(info)}
        queue = info["queue"]
        return input_ids, queue[0:1], {"queue": queue[1:]}
        """,
    ),
    _case("one kept row", "", "return input_ids, self.embed(input_ids), {'last': self.hidden[-1]}"),
    _case(
        "a removed copy", "", "prefill = info.pop('_omni_is_prefill')\nreturn self.a(info) if prefill else self.b(info)"
    ),
    _case("an object of the keywords", "", _TEST.format(test="Namespace(**info)._omni_is_prefill")),
    _case(
        "fields passed by name",
        "",
        "return self.rows(input_ids, _omni_is_prefill=info['_omni_is_prefill'])",
        "def rows(self, ids, _omni_is_prefill):\n    return self.a(ids) if _omni_is_prefill else self.b(ids)",
    ),
    _case(
        "the field as an argument",
        "",
        """
        class M:
            def preprocess(self, input_ids, input_embeds, *, _omni_is_prefill: bool, **_):
                return self.prefill(input_ids) if _omni_is_prefill else self.decode(input_ids)
        """,
    ),
    _case(
        "a batch",
        "",
        """
        class M:
            def preprocess_decode_batch(self, *, input_ids, req_infos):
                if input_ids.numel() != len(req_infos):
                    raise ValueError("one token a request")
                if input_ids.shape[0] == 1:
                    return input_ids, self.one(input_ids), [{}]
                return input_ids, self.many(input_ids), [{} for _ in req_infos]
        """,
    ),
    _case(
        "an image processor",
        "",
        """
        class M:
            def preprocess(self, images, **kwargs):
                if len(images) == 1:
                    return self.one(images)
                return self.many(images)
        """,
    ),
    # -- wrong, and not seen
    _case(
        "unseen: what forward does",
        "",
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def forward(self, input_ids, **kwargs):
                return self.prefill() if input_ids.shape[0] > 1 else self.decode()
        """,
    ),
    _case(
        "what no hook reaches",
        "",
        """
        class M:
            def preprocess(self, input_ids, input_embeds, **info):
                return input_ids, input_embeds, {}

            def other(self, input_ids):
                return self.a() if len(input_ids) > 1 else self.b()
        """,
    ),
]
