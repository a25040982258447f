# SPDX-License-Identifier: Apache-2.0
"""A hook's syntax tree, walked for one row of a step.

The row is one of the contract's table: its span, and with a conforming runner its fields, are known; everything else
is unknown, and where a test is unknown both ways are walked. The walk follows the model's own methods and functions,
also those of other files of the same package. Nothing is imported and nothing is run.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from omni_npu_phase.lint import operations
from omni_npu_phase.lint.calls import Calls, Flow
from omni_npu_phase.lint.effects import touches
from omni_npu_phase.lint.expressions import Frame
from omni_npu_phase.lint.source import Method
from omni_npu_phase.lint.values import UNKNOWN, Callee, Key, Place, Value, concrete, derived, entries, joined, truth

_ENTRIES = 16
"""A loop over more is walked once, for any of them."""


class Walk(Calls):
    """One hook, walked for one row."""

    def hook(self, method: Method, kind: str) -> None:
        """Walk a hook as the runner calls it. ``kind``: preprocess, decode_batch, batch or postprocess."""
        span = Value(const=self.row.span, span=True)
        rows = Value(shape=[span], span=True)
        keywords = Value(keywords=True, state=True, items={}, live=kind in ("decode_batch", "batch"))
        given: dict[str, Value] = {}
        if kind == "preprocess":
            embeds = Value(shape=[span, Value()], span=True)
            given = {"input_ids": rows, "input_embeds": embeds, "inputs_embeds": embeds}
        elif kind == "postprocess":
            given = {"hidden_states": Value(shape=[span, Value()], span=True)}
        elif kind == "decode_batch":
            given = {"input_ids": Value(span=True), "input_embeds": Value(span=True)}
            given["req_infos"] = Value(each=keywords, state=True)
        else:
            given = {"model_intermediate_buffer": Value(each=keywords, state=True)}
            given["req_infos"] = given["model_intermediate_buffer"]
        keywords.items = dict(given)
        bound = self.this if method.is_bound else None
        callee = Callee(method.source, method.node, method.cls, bound)
        names = [each.arg for each in (*method.node.args.posonlyargs, *method.node.args.args)][bound is not None :]
        # Model Runner V2 passes the tokens and their embeddings by position.
        positional = list(given.values())[:2] if kind == "preprocess" and names and "input_ids" not in names else []
        try:
            self._call(callee, positional, {}, keywords, (), top=True)
        except operations.RaisedError:
            return
        except operations.BrokenError:
            self.observed.broken.add(self.row)

    def _block(self, statements: Sequence[ast.stmt], frame: Frame) -> Flow:
        for statement in statements:
            self.statements += 1
            flow = self._statement(statement, frame)
            if flow != "next":
                return flow
        return "next"

    def _statement(self, node: ast.stmt, frame: Frame) -> Flow:
        if isinstance(node, ast.Return):
            value = self._chosen(self._eval(node.value, frame) if node.value is not None else Value(const=None))
            if value.place is None:
                value.place = Place(frame.source, node)
            frame.returned.append(value)
            if frame is self.top:
                self._escaped([value], frame)
                self._event("return", value.place, frame, value)
            return "return"
        if isinstance(node, ast.Raise):
            return "raise"
        if isinstance(node, ast.If):
            return self._if(node, frame)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            if node.value is not None:
                value = self._eval(node.value, frame)
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    self._assign(target, value, frame)
        elif isinstance(node, ast.AugAssign):
            old = self._eval(node.target, frame)
            value = operations.binary(node.op, old, self._eval(node.value, frame))
            if isinstance(node.op, ast.BitOr):
                self._update(old, [self._eval(node.value, frame)], {}, Place(frame.source, node), frame)
                value = old
            self._assign(node.target, value, frame)
        elif isinstance(node, ast.Expr):
            self._expression_statement(node.value, frame)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            return self._for(node, frame)
        elif isinstance(node, ast.While):
            test = self._eval(node.test, frame)
            outcome = truth(test)
            key = self._tested(node, test, outcome, frame, (False, touches(node.body)))
            with self._by(node, key):
                if outcome is not False:
                    self._maybe([lambda: self._block(node.body, frame)], frame)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                value = self._eval(item.context_expr, frame)
                if item.optional_vars is not None:
                    self._assign(item.optional_vars, value, frame)
            return self._block(node.body, frame)
        elif type(node).__name__ in ("Try", "TryStar"):
            with self._by(node):
                return self._try(cast(ast.Try, node), frame)
        elif isinstance(node, ast.Match):
            with self._by(node):
                return self._match(node, frame)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            frame.env[node.name] = Value(const=Callee(frame.source, node, frame.owner, None, frame))
        elif isinstance(node, ast.Assert):
            self._eval(node.test, frame)
        elif isinstance(node, ast.Delete):
            for gone in node.targets:
                if isinstance(gone, ast.Subscript):
                    self._removed(self._eval(gone.value, frame), self._eval(gone.slice, frame), gone, frame)
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            frame.shared |= set(node.names)
        elif isinstance(node, (ast.Break, ast.Continue)):
            return "loop"
        return "next"

    def _expression_statement(self, node: ast.expr, frame: Frame) -> None:
        """``test and call()`` is an if without the word."""
        if isinstance(node, ast.BoolOp) and touches([node.values[-1]]):
            for each in node.values[:-1]:
                test = self._eval(each, frame)
                self._tested(each, test, truth(test), frame, (True, True))
        self._eval(node, frame)

    def _if(self, node: ast.If, frame: Frame) -> Flow:
        test = self._eval(node.test, frame)
        outcome = truth(test)
        leaves = isinstance(node.body[-1], (ast.Return, ast.Continue))
        key = self._tested(node, test, outcome, frame, (touches(node.orelse) or leaves, touches(node.body)))
        with self._by(node, key):
            if outcome is not None:
                return self._block(node.body if outcome else node.orelse, frame)
            ways = [lambda: self._block(node.body, frame), lambda: self._block(node.orelse, frame)]
            return _joined_flow(self._maybe(ways, frame))

    @contextmanager
    def _by(self, node: ast.stmt, tests: frozenset[Key] = frozenset()) -> Iterator[None]:
        """What is made in the block is made under these tests, and what follows a statement that may return too."""
        before = self.under
        self.under |= tests
        try:
            yield
        finally:
            if not _returns(node):
                self.under = before

    def _maybe(self, ways: Sequence[Callable[[], Flow]], frame: Frame) -> list[Flow]:
        """Walk each way from here; afterwards a variable is what any way that goes on has made of it."""
        before = frame.env
        self.unsure += 1
        ends: list[dict[str, Value]] = [dict(before)] if len(ways) == 1 else []
        flows: list[Flow] = []
        broken = 0
        for way in ways:
            frame.env = dict(before)
            try:
                flows.append(way())
            except operations.BrokenError:
                broken += 1
                flows.append("raise")
            if flows[-1] in ("next", "loop"):
                ends.append(frame.env)
        self.unsure -= 1
        if broken == len(ways):
            frame.env = before
            raise operations.BrokenError
        if "return" in flows and "next" in flows:
            # What follows is reached by some rows only; the caller ends the function.
            self.unsure += 1
        frame.env = ends[0] if ends else before
        for end in ends[1:]:
            for name, value in end.items():
                frame.env[name] = joined(frame.env[name], value) if name in frame.env else value
        return flows

    def _for(self, node: ast.For | ast.AsyncFor, frame: Frame) -> Flow:
        over = self._eval(node.iter, frame)
        known = entries(over)
        if known is not None and len(known) <= _ENTRIES:
            if over.span:
                self._tested(node, over, bool(known), frame, (False, touches(node.body)))
            for each in known:
                self._assign(node.target, each, frame)
                flow = self._block(node.body, frame)
                if flow in ("return", "raise"):
                    return flow
            return self._block(node.orelse, frame)

        def once() -> Flow:
            self._assign(node.target, over.each or derived([over]), frame)
            flow = self._block(node.body, frame)
            return "loop" if flow == "next" else flow

        over_state = Value(state=over.state, keys=over.keys)
        key = self._tested(node, over_state, None, frame, (False, touches(node.body)))
        with self._by(node, key):
            self._maybe([once], frame)
        return self._block(node.orelse, frame)

    def _try(self, node: ast.Try, frame: Frame) -> Flow:
        before, known = dict(frame.env), self.asked
        unsure = self.unsure
        acts = touches(node.body), any(touches(handler.body) for handler in node.handlers)

        def tested(outcome: bool | None) -> None:
            test = Value(state=any(_asks(handler.type) for handler in node.handlers))
            self.under |= self._tested(node, test, outcome, frame, acts) if any(acts) else frozenset()

        def handlers() -> Flow:
            ways = [functools.partial(self._block, handler.body, frame) for handler in node.handlers]
            return _joined_flow(self._maybe(ways, frame) if len(ways) > 1 else [way() for way in ways])

        try:
            flow = self._block(node.body, frame)
            if flow == "raise" and node.handlers:
                flow = handlers()
            elif node.handlers and self.asked == known:
                # What is not about the fields may fail on any runner.
                tested(None)
                after, frame.env = frame.env, before

                def went_well() -> Flow:
                    frame.env = after
                    return flow

                flow = _joined_flow(self._maybe([went_well, handlers], frame))
            if flow == "next":
                flow = self._block(node.orelse, frame)
        except operations.BrokenError:
            if not node.handlers:
                raise
            frame.env, self.unsure = before, unsure
            tested(False)
            flow = handlers()
        last = self._block(node.finalbody, frame)
        return last if last != "next" else flow

    def _match(self, node: ast.Match, frame: Frame) -> Flow:
        subject = self._eval(node.subject, frame)
        flows: list[Flow] = []
        for case in node.cases:
            outcome = self._matches(case.pattern, subject, frame)
            if case.guard is not None and outcome is not False:
                guard = truth(self._eval(case.guard, frame))
                outcome = None if guard is None or outcome is None else guard
            test = derived([subject])
            test.test = subject.test or (Place(frame.source, node.subject) if subject.span else None)
            self.under |= self._tested(case.pattern, test, outcome, frame, (True, touches(case.body)))
            if outcome is False:
                continue
            body = case.body
            if outcome:
                flows.append(self._block(body, frame))
                break
            flows += self._maybe([functools.partial(self._block, body, frame)], frame)
        else:
            flows.append("next")
        return _joined_flow(flows)

    def _matches(self, pattern: ast.pattern, subject: Value, frame: Frame) -> bool | None:
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            self._captured(pattern.name, subject, frame)
            return True
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is not None:
            self._captured(pattern.name, subject, frame)
            return self._matches(pattern.pattern, subject, frame)
        if isinstance(pattern, ast.MatchOr):
            found = [self._matches(each, subject, frame) for each in pattern.patterns]
            return True if True in found else None if None in found else False
        if isinstance(pattern, ast.MatchSequence) and subject.elements is not None:
            return self._match_sequence(pattern.patterns, subject.elements, frame)
        known = concrete(subject)
        if isinstance(pattern, (ast.MatchValue, ast.MatchSingleton)) and known is not UNKNOWN:
            value = pattern.value
            wanted = concrete(self._eval(value, frame)) if isinstance(value, ast.expr) else value
            return None if wanted is UNKNOWN else bool(known == wanted)
        return None

    def _match_sequence(self, patterns: list[ast.pattern], parts: list[Value], frame: Frame) -> bool | None:
        starred = [at for at, each in enumerate(patterns) if isinstance(each, ast.MatchStar)]
        if len(parts) < len(patterns) - len(starred) or (not starred and len(parts) != len(patterns)):
            return False
        if starred:  # what it takes may be anything
            behind = len(patterns) - 1 - starred[0]
            parts = [*parts[: starred[0]], *parts[len(parts) - behind :]]
            patterns = [*patterns[: starred[0]], *patterns[starred[0] + 1 :]]
        found = [self._matches(each, part, frame) for each, part in zip(patterns, parts, strict=True)]
        return False if False in found else None if None in found else True

    @staticmethod
    def _captured(name: str | None, subject: Value, frame: Frame) -> None:
        if name is not None:
            frame.env[name] = subject


def _asks(error: ast.expr | None) -> bool:
    """Whether an except clause is for what is missing, so that the try asks whether it is there."""
    names = {getattr(each, "id", "") for each in ast.walk(error)} if error is not None else {"Exception"}
    return bool(names & {"Exception", "BaseException", "KeyError", "IndexError", "LookupError", "AttributeError"})


@functools.lru_cache(maxsize=100_000)
def _returns(node: ast.AST) -> bool:
    """Whether the function ends on one of the ways through a statement, so that the others lead to what follows."""
    return any(isinstance(each, ast.Return) for each in ast.walk(node))


def _joined_flow(flows: Sequence[Flow]) -> Flow:
    """How it goes on after one of several ways."""
    return next((flow for flow in ("next", "loop", "return") if flow in flows), "raise")
