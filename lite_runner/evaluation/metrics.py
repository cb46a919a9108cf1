# ruff: noqa: RUF001 - punctuation of Chinese texts
"""Scores of samples, their means and standard errors, and whether two runs differ."""

from __future__ import annotations

import itertools
import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lite_runner.errors import EnvironmentFault
from lite_runner.evaluation.prompts import Sample
from lite_runner.evaluation.tasks import Filter, FilterStep, Metric
from lite_runner.records import dataclass
from lite_runner.system.files import parse_json
from lite_runner.text.chat_templates import render_template

RESAMPLES = 1000  # resamples of a bootstrap
RESAMPLED = 1 << 24  # numbers drawn at a time, at most
_FIND = "{{ text | regex_findall(pattern) | tojson }}"
_REPLACE = "{{ text | regex_replace(pattern, '') }}"
PERPLEXITIES = ("perplexity", "token_perplexity")  # metrics over means of logarithms
_PERCENT = ("em", "rouge", "bleu")  # MindFormers'
_GRADUAL = (*PERPLEXITIES, "rouge", "bleu")  # metrics without right or wrong
# MindFormers' EmF1Metric: its punctuation, and characters that are words.
_MARKS = dict.fromkeys(map(ord, "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』"))
_MIXED = re.compile(r"([\u4e00-\u9fa5])")
# jieba's blocks of words, and the separators of non-Chinese text.
_CHINESE = re.compile(r"[\u4e00-\u9fd5]")
_BLOCK = re.compile(r"([a-zA-Z0-9+#&._%\-]+)")
_SPACES = re.compile(r"\r\n|.", re.DOTALL)
_NAMED = re.compile(r"(AT&T|[cC]#|[cC]\+\+)")
_LATIN = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")
# rouge_chinese's sentence ends, in order.
_ENDS = [
    (re.compile(pattern), parted)
    for pattern, parted in (
        (r"([。！？\?])([^”’])", r"\1\n\2"),
        (r"(\.{6})([^”’])", r"\1\n\2"),
        (r"(\…{2})([^”’])", r"\1\n\2"),
        (r"([。！？\?][”’])([^，。！？\?])", r"\1\n\2"),
    )
]
_WORD = re.compile(r"[\u4e00-\u9fff]|[^\W\u4e00-\u9fff]+")  # a Chinese character is a word


def scale_of(metric: str) -> str:
    """The unit of a metric, whose name may include a filter."""
    name = metric.partition(",")[0]
    if name in PERPLEXITIES:
        return "perplexity"
    return "percent" if name.startswith(_PERCENT) else "share"


@dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation."""

    logprob: float  # the sum over its tokens
    greedy: bool  # each token is the most likely one


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The scores of a sample by metric, or `metric, filter` where the task has filters."""

    values: Mapping[str, float]
    answers: Mapping[str, str]  # by filter

    @property
    def correct(self) -> bool | None:
        """True if the first score is right; None for a metric without right or wrong."""
        first = next((v for k, v in self.values.items() if not k.startswith(_GRADUAL)), None)
        return None if first is None else first >= 1


def scored_choices(sample: Sample, found: Sequence[Likelihood]) -> Scores:
    if sample.task.output_type == "loglikelihood":
        (scored,) = sample.continuations
        values = {
            "perplexity": found[0].logprob,
            "token_perplexity": found[0].logprob / (len(scored.ids) - scored.start),
            "acc": float(found[0].greedy),
        }
        names = [one.metric for one in sample.task.metrics]
        return Scores(values={name: values[name] for name in names}, answers={})
    logprobs = np.array([one.logprob for one in found])
    targets = sample.target if isinstance(sample.target, list) else [sample.target]
    lengths = [max(1, len(choice)) for choice in sample.choices]
    sizes = [max(1, len(choice.encode("utf-8", "replace"))) for choice in sample.choices]
    scores = {
        "acc": float(int(logprobs.argmax()) in targets),
        "acc_norm": float(int((logprobs / lengths).argmax()) in targets),
        "acc_bytes": float(int((logprobs / sizes).argmax()) in targets),
        "exact_match": float(any(found[place].greedy for place in targets)),
    }
    values = {one.metric: scores[one.metric] for one in sample.task.metrics}
    return Scores(values=values, answers={"none": sample.choices[int(logprobs.argmax())]})


def scored_text(sample: Sample, text: str) -> Scores:
    """The scores of a generated text, by each of the task's filters."""
    values, answers = dict[str, float](), dict[str, str]()
    target = sample.target
    if isinstance(target, int):
        target = sample.choices[target]
    targets = [str(one) for one in (target if isinstance(target, list) else [target])]
    for one in sample.task.filters:
        answers[one.name] = answer = filtered(one, text, sample.name)
        for metric in sample.task.metrics:
            scores = [_text_scores(metric, answer, each, sample.name) for each in targets]
            for name in dict.fromkeys(name for score in scores for name in score):
                label = name if one.name == "none" else f"{name}, {one.name}"
                values[label] = max(score[name] for score in scores if name in score)
    return Scores(values=values, answers=answers)


def _text_scores(metric: Metric, answer: str, target: str, source: str) -> dict[str, float]:
    """The scores of a text by a metric, of which MindFormers' have several."""
    if metric.metric == "em_f1":
        return em_f1(answer, target)
    if metric.metric == "adgen":
        return adgen(answer, target)
    match = exact_match if metric.metric == "exact_match" else f1
    return {metric.metric: match(metric, answer, target, source)}


def filtered(one: Filter, text: str, source: str) -> str:
    """The answer that a filter finds in a text."""
    for step in one.filter:
        if step.function == "regex":
            text = _found(step, text, source)
        elif step.function == "remove_whitespace":
            text = text.strip()
        elif step.function in ("lowercase", "uppercase"):
            text = text.lower() if step.function == "lowercase" else text.upper()
    return text


def _found(step: FilterStep, text: str, source: str) -> str:
    """The match of a regular expression, which is rendered in the process of templates: it may take
    as long as it likes, and that process may not."""
    values = {"text": text, "pattern": step.regex_pattern}
    matches = parse_json(render_template(_FIND, values, source=source, of_task=True))
    try:
        match = matches[step.group_select]
    except IndexError:
        return step.fallback
    if isinstance(match, list):
        match = next((group for group in match if group), step.fallback)
    return str(match).strip()


def exact_match(metric: Metric, answer: str, target: str, source: str) -> float:
    """1 where both texts are the same but for what the metric ignores, as lm_eval has it."""
    pair = [answer, target]
    for pattern in metric.regexes_to_ignore:
        pair = [
            render_template(
                _REPLACE, {"text": text, "pattern": pattern}, source=source, of_task=True
            )
            for text in pair
        ]
    if metric.ignore_case:
        pair = [text.lower() for text in pair]
    unwanted = (
        string.punctuation * metric.ignore_punctuation + string.digits * metric.ignore_numbers
    )
    first, second = (text.translate(dict.fromkeys(map(ord, unwanted))) for text in pair)
    return float(first == second)


def f1(metric: Metric, answer: str, target: str, source: str) -> float:
    """The harmonic mean of the shares of words that both texts have: SQuAD's."""
    words = [_WORD.findall(_without_articles(text)) for text in (answer, target)]
    if not all(words):
        return float(words[0] == words[1])
    common = sum((Counter(words[0]) & Counter(words[1])).values())
    return 2 * common / (len(words[0]) + len(words[1]))


def _without_articles(text: str) -> str:
    plain = text.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return re.sub(r"\b(a|an|the)\b", " ", plain)


def em_f1(answer: str, target: str) -> dict[str, float]:
    """MindFormers' EmF1Metric, in percent, of the first line of an answer: whether both are the
    same but for punctuation, and the F1 of their longest common run of words."""
    answer = answer.strip().split("\n")[0]
    mine, other = (_without_marks(text.lower().strip()) for text in (answer, target))
    same = float(mine == other)
    words = [
        [
            word
            for part in _MIXED.split(_without_marks(text.lower().strip()))
            for word in ([part] if _MIXED.fullmatch(part) else split_words(part))
        ]
        for text in (answer, target)
    ]
    common = _longest_run(*words)
    score = 2 * common / (len(words[0]) + len(words[1])) if common else 0.0
    return {"em": 100 * same, "em_f1": 100 * score}


def adgen(answer: str, target: str) -> dict[str, float]:
    """MindFormers' ADGENMetric, in percent: ROUGE of words and BLEU of characters. An empty answer
    has no scores, as there."""
    if not answer.strip() or not target.strip():
        return {}
    mine, other = (_rouge_words(split_words(text)) for text in (answer, target))
    scores = {
        "rouge_1": _shared(len({*mine} & {*other}), len({*mine}), len({*other})),
        "rouge_2": _shared(
            *(len(found) for found in (_pairs(mine) & _pairs(other), _pairs(mine), _pairs(other)))
        ),
        "rouge_l": _shared(_common_subsequence(mine, other), len(mine), len(other)),
        "bleu_4": bleu(answer, target),
    }
    return {name: round(100 * value, 4) for name, value in scores.items()}


def split_words(text: str) -> list[str]:
    """Words as jieba cuts them, which is asked where there are Chinese ones.

    Raises EnvironmentFault where it is not installed.
    """
    if _CHINESE.search(text):
        try:
            import jieba  # type: ignore[import-not-found, import-untyped, unused-ignore]
        except ImportError:
            raise EnvironmentFault(
                "adgen: words of Chinese texts are cut by jieba, which is not installed",
                "pip install jieba",
            ) from None
        return list(jieba.cut(text))
    found = list[str]()
    for place, block in enumerate(_BLOCK.split(text)):
        if place % 2 == 0:  # between blocks: spaces and other characters, one by one
            found += _SPACES.findall(block)
            continue
        for part in _NAMED.split(block):
            found += [part] if _NAMED.fullmatch(part) else filter(None, _LATIN.split(part))
    return found


def _without_marks(text: str) -> str:
    return text.translate(_MARKS)


def _longest_run(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common run of words."""
    longest, before = 0, [0] * (len(second) + 1)
    for word in first:
        now = [0]
        now += [before[place] + 1 if word == each else 0 for place, each in enumerate(second)]
        longest, before = max(longest, *now), now
    return longest


def _common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    before = [0] * (len(second) + 1)
    for word in first:
        now = [0]
        for place, each in enumerate(second):
            now.append(before[place] + 1 if word == each else max(now[-1], before[place + 1]))
        before = now
    return before[-1]


def _rouge_words(words: Sequence[str]) -> list[str]:
    """The words of a text's sentences as rouge_chinese has them; an empty line is one too."""
    text = " ".join(words)
    for pattern, parted in _ENDS:
        text = pattern.sub(parted, text)
    lines = (" ".join(line.split()) for line in text.rstrip().split("\n") if line)
    return [word for line in lines for word in line.split(" ")]


def _pairs(words: Sequence[str]) -> set[tuple[str, str]]:
    return set(itertools.pairwise(words))


def _shared(common: int, mine: int, other: int) -> float:
    """ROUGE's F1."""
    precision = common / mine if mine else 0.0
    recall = common / other if other else 0.0
    return 2 * precision * recall / (precision + recall + 1e-8)


def bleu(answer: str, target: str) -> float:
    """BLEU-4 of characters, smoothed by NLTK's method 3, NIST's."""
    precisions, smoothed = list[float](), 0
    for size in range(1, 5):
        mine, other = (
            Counter(text[place : place + size] for place in range(len(text) - size + 1))
            for text in (answer, target)
        )
        common, count = sum((mine & other).values()), max(1, sum(mine.values()))
        if not common:
            if size == 1:
                return 0.0
            smoothed += 1
        precisions.append(common / count if common else 1 / (2**smoothed * count))
    brevity = min(1.0, math.exp(1 - len(target) / len(answer)))
    return brevity * math.exp(math.fsum(0.25 * math.log(one) for one in precisions))


@dataclass(frozen=True, kw_only=True)
class MetricResult:
    """A metric over all samples; stderr None: fewer than two samples."""

    metric: str
    value: float
    stderr: float | None


def figures(scores: Sequence[Mapping[str, float]]) -> list[MetricResult]:
    """The metrics, each over the samples that have it: an empty answer has no ROUGE."""
    names = dict.fromkeys(name for one in scores for name in one)
    return [_figure(name, np.array([one[name] for one in scores if name in one])) for name in names]


def _figure(name: str, values: np.ndarray[Any, np.dtype[np.float64]]) -> MetricResult:
    several = len(values) > 1
    if name in PERPLEXITIES:
        means = _resampled(values) if several else values
        with np.errstate(over="ignore", invalid="ignore"):
            error = float(np.exp(-means).std(ddof=1)) if several else None
        error = error if error is not None and math.isfinite(error) else None
        perplexity = math.exp(min(-float(values.mean()), 700.0))  # exp overflows beyond 709
        return MetricResult(metric=name, value=perplexity, stderr=error)
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if several else None
    return MetricResult(metric=name, value=float(values.mean()), stderr=error)


def _resampled(
    values: np.ndarray[Any, np.dtype[np.float64]],
) -> np.ndarray[Any, np.dtype[np.float64]]:
    draw = np.random.default_rng(0)
    count = max(1, min(RESAMPLES, RESAMPLED // len(values)))
    parts, left = [], RESAMPLES
    while left > 0:
        rows = min(count, left)
        parts.append(values[draw.integers(0, len(values), (rows, len(values)))].mean(axis=1))
        left -= rows
    found: np.ndarray[Any, np.dtype[np.float64]] = np.concatenate(parts)
    return found


def pooled(parts: Sequence[tuple[MetricResult, int]]) -> MetricResult:
    """A metric over the parts of a task, each with its number of samples: lm_eval's mean by size,
    and its pooled standard error."""
    sizes = [size for _, size in parts]
    value = sum(one.value * size for one, size in parts) / sum(sizes)
    if any(one.stderr is None for one, _ in parts) or sum(sizes) == len(sizes):
        return MetricResult(metric=parts[0][0].metric, value=value, stderr=None)
    squares = sum((size - 1) * (one.stderr or 0.0) ** 2 * size for one, size in parts)
    error = math.sqrt(squares / (sum(sizes) - len(sizes)) / sum(sizes))
    return MetricResult(metric=parts[0][0].metric, value=value, stderr=error)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A metric of two runs over the same samples."""

    task: str
    metric: str
    samples: int
    value: float
    other: float
    better: int  # samples that only this run gets right
    worse: int  # and only the other run
    p: float  # probability of such a difference or a larger one by chance: McNemar's exact test
    low: float  # 95 % interval of the mean's difference: paired bootstrap
    high: float


def difference(task: str, metric: str, mine: Sequence[float], other: Sequence[float]) -> Difference:
    """The comparison of two runs, whose samples come in pairs."""
    ours, theirs = np.array(mine), np.array(other)
    means = np.sort(_resampled(ours - theirs))
    better, worse = int((ours > theirs).sum()), int((ours < theirs).sum())
    return Difference(
        task=task,
        metric=metric,
        samples=len(ours),
        value=float(ours.mean()),
        other=float(theirs.mean()),
        better=better,
        worse=worse,
        p=mcnemar(better, worse),
        low=float(means[int(0.025 * len(means))]),
        high=float(means[int(0.975 * len(means)) - 1]),
    )


def mcnemar(better: int, worse: int) -> float:
    """The probability, two-sided, that of so many samples that differ as few, or fewer, are on one
    side where each side is as likely."""
    count, few = better + worse, min(better, worse)
    if not count:
        return 1.0
    log_all = count * math.log(2)
    terms = (
        math.exp(math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) - log_all)
        for k in range(few + 1)
    )
    return min(1.0, 2 * sum(terms))
