"""Every metric of torchmetrics: joined over ranks, the same as of one process."""

from __future__ import annotations

import contextlib
import copy
import importlib
import pkgutil
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics as tm
from torch import Tensor, nn

from mpitrain.data.samples import leaves_of
from mpitrain.errors import DataError, UsageError
from mpitrain.train.metric_objects import numbers_of
from mpitrain.train.metric_states import TorchMetric

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SIZES = (3, 3, 3, 3, 3, 2)  # samples of the batches
C = 4  # classes, labels

Batch = tuple[Any, ...]
Draw = Callable[[torch.Generator, int], Batch]
Make = Callable[[], Any]
Errors = tuple[type[Exception], ...]


# --- batches of every kind --------------------------------------------------------


def rand(g: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=g, dtype=torch.float64)


def ints(g: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=g)


def binary(g: torch.Generator, n: int) -> Batch:
    return rand(g, n), ints(g, 2, n)


def binary_groups(g: torch.Generator, n: int) -> Batch:
    return rand(g, n), ints(g, 2, n), ints(g, 2, n)


def multiclass(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, C).softmax(1), ints(g, C, n)


def multilabel(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, C), ints(g, 2, n, C)


def labels(g: torch.Generator, n: int) -> Batch:
    return ints(g, C, n), ints(g, C, n)


def grid(g: torch.Generator, n: int) -> Batch:
    return ints(g, C, n, 6), ints(g, C, n, 6)


def multilabel_grid(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, C, 6), ints(g, 2, n, C, 6)


def values(g: torch.Generator, n: int) -> Batch:
    targets = rand(g, n) + 0.1
    return targets + 0.3 * rand(g, n), targets


def pairs(g: torch.Generator, n: int) -> Batch:
    targets = rand(g, n, 2) + 0.1
    return targets + 0.3 * rand(g, n, 2), targets


def distributions(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 5).softmax(1), rand(g, n, 5).softmax(1)


def ensemble(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 5), rand(g, n)


def one(g: torch.Generator, n: int) -> Batch:
    return (rand(g, n),)


def ranked(g: torch.Generator, n: int) -> Batch:
    return rand(g, 4 * n), ints(g, 2, 4 * n), ints(g, 6, 4 * n)


def clusters(g: torch.Generator, n: int) -> Batch:
    return rand(g, 2 * n, 3), ints(g, 3, 2 * n)


def ratings(g: torch.Generator, n: int) -> Batch:
    chosen = ints(g, C, n, 10)
    return (torch.stack([(chosen == c).sum(1) for c in range(C)], 1),)


def images(g: torch.Generator, n: int) -> Batch:
    targets = rand(g, n, 3, 16, 16) * 0.9 + 0.05
    return (targets + 0.05 * rand(g, n, 3, 16, 16)).clamp(0, 1), targets


def gray(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 1, 16, 16), rand(g, n, 1, 16, 16)


def large(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 1, 48, 48), rand(g, n, 1, 48, 48)


def fused(g: torch.Generator, n: int) -> Batch:
    shapes = {"ms": (8, 8), "pan": (16, 16)}
    more = {name: rand(g, n, 3, *shape) for name, shape in shapes.items()}
    return rand(g, n, 3, 16, 16), more


def masks(g: torch.Generator, n: int) -> Batch:
    return ints(g, 2, n, 3, 8, 8), ints(g, 2, n, 3, 8, 8)


def panoptic(g: torch.Generator, n: int) -> Batch:
    def draw() -> Tensor:
        return torch.stack([ints(g, 4, n, 8, 8), ints(g, 2, n, 8, 8)], -1)

    return draw(), draw()


def boxes(g: torch.Generator, n: int, fewest: int = 0) -> Batch:
    """Draw boxes; some images have none."""

    def draw(num: int, *, has_scores: bool) -> dict[str, Tensor]:
        corners = 50 * rand(g, num, 2)
        found = {"boxes": torch.cat([corners, corners + 5 + 40 * rand(g, num, 2)], 1)}
        found["labels"] = ints(g, 3, num)
        found["masks"] = rand(g, num, 12, 12) > 0.4
        return {**found, "scores": rand(g, num)} if has_scores else found

    counts = (fewest + ints(g, 4, n, 2)).tolist()
    return (
        [draw(a, has_scores=True) for a, _ in counts],
        [draw(b, has_scores=False) for _, b in counts],
    )


def signals(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 600) - 0.5, rand(g, n, 600) - 0.5


def sources(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 2, 300) - 0.5, rand(g, n, 2, 300) - 0.5


def spectra(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 9, 20, 2) - 0.5, rand(g, n, 9, 20, 2) - 0.5


def logits(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 7, 11), ints(g, 11, n, 7)


def points(g: torch.Generator, n: int) -> Batch:
    return rand(g, n, 12, 3), rand(g, n, 12, 3)


def vertices(g: torch.Generator, n: int) -> Batch:
    return rand(g, 8 * n, 30, 3), rand(g, 8 * n, 30, 3)


def words(g: torch.Generator, n: int) -> Batch:
    def draw() -> list[str]:
        some = ("the", "cat", "is", "on", "a", "mat", "there")
        return [" ".join(some[i] for i in ints(g, 7, 9).tolist()) for _ in range(n)]

    return draw(), draw()


def translations(g: torch.Generator, n: int) -> Batch:
    found, expected = words(g, n)
    return found, [[it] for it in expected]


def answers(g: torch.Generator, n: int) -> Batch:
    found, expected = words(g, n)
    texts = [{"text": [it], "answer_start": [0]} for it in expected]
    return (
        [{"prediction_text": it, "id": str(i)} for i, it in enumerate(found)],
        [{"answers": it, "id": str(i)} for i, it in enumerate(texts)],
    )


# --- a case of every class --------------------------------------------------------

BINARY = {"validate_args": True}
MULTICLASS = {"num_classes": C}
MULTILABEL = {"num_labels": C}
KINDS = {
    "Binary": (binary, BINARY),
    "Multiclass": (multiclass, MULTICLASS),
    "Multilabel": (multilabel, MULTILABEL),
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "FBetaScore": {"beta": 0.5},
    "PrecisionAtFixedRecall": {"min_recall": 0.3},
    "RecallAtFixedPrecision": {"min_precision": 0.3},
    "SensitivityAtSpecificity": {"min_specificity": 0.3},
    "SpecificityAtSensitivity": {"min_sensitivity": 0.3},
    "GroupStatRates": {"num_groups": 2},
    "Fairness": {"num_groups": 2},
}

OTHERS: dict[str, tuple[Draw, list[dict[str, Any]]]] = {
    # aggregation
    "MaxMetric": (one, [{}]),
    "MinMetric": (one, [{}]),
    "SumMetric": (one, [{}]),
    "MeanMetric": (one, [{}]),
    "CatMetric": (one, [{}]),
    # regression
    "ConcordanceCorrCoef": (pairs, [{"num_outputs": 2}]),
    "PearsonCorrCoef": (pairs, [{"num_outputs": 2}]),
    "CosineSimilarity": (pairs, [{}, {"reduction": "none"}]),
    "ContinuousRankedProbabilityScore": (ensemble, [{}]),
    "CriticalSuccessIndex": (values, [{"threshold": 0.5}]),
    "ExplainedVariance": (pairs, [{"multioutput": "raw_values"}]),
    "JensenShannonDivergence": (distributions, [{}, {"reduction": "none"}]),
    "KLDivergence": (distributions, [{}, {"reduction": "none"}, {"log_prob": True}]),
    "KendallRankCorrCoef": (pairs, [{"num_outputs": 2}]),
    "LogCoshError": (pairs, [{"num_outputs": 2}]),
    "MeanSquaredLogError": (values, [{}]),
    "MeanAbsoluteError": (pairs, [{}, {"num_outputs": 2}]),
    "MeanAbsolutePercentageError": (values, [{}]),
    "MinkowskiDistance": (values, [{"p": 3}]),
    "MeanSquaredError": (pairs, [{}, {"squared": False}, {"num_outputs": 2}]),
    "NormalizedRootMeanSquaredError": (
        values,
        [{"normalization": it} for it in ("mean", "range", "std", "l2")],
    ),
    "R2Score": (pairs, [{"multioutput": "raw_values"}]),
    "RelativeSquaredError": (pairs, [{"num_outputs": 2}]),
    "SpearmanCorrCoef": (pairs, [{"num_outputs": 2}]),
    "SymmetricMeanAbsolutePercentageError": (values, [{}]),
    "TweedieDevianceScore": (values, [{}, {"power": 2}]),
    "WeightedMeanAbsolutePercentageError": (values, [{}]),
    # clustering and nominal
    **dict.fromkeys(
        (
            *("AdjustedMutualInfoScore", "AdjustedRandScore", "FowlkesMallowsIndex"),
            *("HomogeneityScore", "CompletenessScore", "VMeasureScore", "RandScore"),
            *("MutualInfoScore", "NormalizedMutualInfoScore"),
        ),
        (labels, [{}]),
    ),
    **dict.fromkeys(
        ("CalinskiHarabaszScore", "DaviesBouldinScore", "DunnIndex"), (clusters, [{}])
    ),
    **dict.fromkeys(
        ("CramersV", "PearsonsContingencyCoefficient", "TheilsU", "TschuprowsT"),
        (labels, [{"num_classes": C}]),
    ),
    "FleissKappa": (ratings, [{"mode": "counts"}]),
    # retrieval
    **dict.fromkeys(
        (
            *("RetrievalAUROC", "RetrievalMAP", "RetrievalFallOut", "RetrievalMRR"),
            *("RetrievalHitRate", "RetrievalNormalizedDCG", "RetrievalPrecision"),
            *("RetrievalPrecisionRecallCurve", "RetrievalRPrecision"),
            *("RetrievalRecallAtFixedPrecision", "RetrievalRecall"),
        ),
        (ranked, [{}]),
    ),
    # segmentation and shapes
    "DiceScore": (masks, [{"num_classes": 3, "average": it} for it in ("micro", None)]),
    "GeneralizedDiceScore": (masks, [{"num_classes": 3, "per_class": True}]),
    "HausdorffDistance": (masks, [{"num_classes": 3}]),
    "MeanIoU": (masks, [{}, {"num_classes": 3}, {"per_class": True}]),
    "ProcrustesDisparity": (points, [{}, {"reduction": "sum"}]),
    # images
    "ErrorRelativeGlobalDimensionlessSynthesis": (images, [{}]),
    "PeakSignalNoiseRatio": (
        images,
        [
            *({"data_range": 1.0}, {"data_range": (0.1, 0.9)}),
            {"data_range": 1.0, "dim": (1, 2, 3), "reduction": "none"},
        ],
    ),
    "PeakSignalNoiseRatioWithBlockedEffect": (gray, [{"data_range": 1.0}]),
    "QualityWithNoReference": (fused, [{"window_size": 5}]),
    "RelativeAverageSpectralError": (images, [{}]),
    "RootMeanSquaredErrorUsingSlidingWindow": (images, [{}]),
    "SpatialCorrelationCoefficient": (images, [{}]),
    "SpatialDistortionIndex": (fused, [{"window_size": 5}]),
    "SpectralAngleMapper": (images, [{}, {"reduction": "none"}]),
    "SpectralDistortionIndex": (images, [{}]),
    "StructuralSimilarityIndexMeasure": (
        images,
        [{"data_range": 1.0}, {}, {"data_range": 1.0, "reduction": "none"}],
    ),
    "MultiScaleStructuralSimilarityIndexMeasure": (
        large,
        [{"data_range": 1.0, "kernel_size": 3, "betas": (0.5, 0.5)}],
    ),
    "TotalVariation": (
        lambda g, n: images(g, n)[:1],
        [{}, {"reduction": "mean"}, {"reduction": "none"}],
    ),
    "UniversalImageQualityIndex": (images, [{}]),
    "VisualInformationFidelity": (large, [{}, {"reduction": "none"}]),
    # detection
    "MeanAveragePrecision": (
        boxes,
        [
            {},
            {"class_metrics": True},
            {"iou_type": "segm"},
            {"iou_type": ["bbox", "segm"]},
        ],
    ),
    "IntersectionOverUnion": (
        lambda g, n: boxes(g, n, 1),  # none, with class_metrics, is an error (1.9)
        [{}, {"class_metrics": True}],
    ),
    "CompleteIntersectionOverUnion": (boxes, [{}]),
    "DistanceIntersectionOverUnion": (boxes, [{}]),
    "GeneralizedIntersectionOverUnion": (boxes, [{}]),
    **dict.fromkeys(
        ("PanopticQuality", "ModifiedPanopticQuality"),
        (panoptic, [{"things": {0, 1}, "stuffs": {2, 3}}]),
    ),
    # audio, video and text
    **dict.fromkeys(
        (
            *("SignalDistortionRatio", "ScaleInvariantSignalDistortionRatio"),
            *("SignalNoiseRatio", "ScaleInvariantSignalNoiseRatio"),
        ),
        (signals, [{}]),
    ),
    "SourceAggregatedSignalDistortionRatio": (sources, [{}]),
    "ComplexScaleInvariantSignalNoiseRatio": (spectra, [{}]),
    "LipVertexError": (vertices, [{"mouth_map": [0, 1, 2, 5]}]),
    "Perplexity": (logits, [{}]),
    **dict.fromkeys(
        (
            *("CharErrorRate", "EditDistance", "MatchErrorRate", "WordErrorRate"),
            *("WordInfoLost", "WordInfoPreserved"),
        ),
        (words, [{}]),
    ),
    **dict.fromkeys(
        (
            *("BLEUScore", "CHRFScore", "ExtendedEditDistance", "SacreBLEUScore"),
            "TranslationEditRate",
        ),
        (translations, [{}]),
    ),
    "SQuAD": (answers, [{}]),
}

NETWORK = "has weights that are downloaded"
LEFT_OUT = {
    **dict.fromkeys(
        (
            *("ARNIQA", "DeepImageStructureAndTextureSimilarity", "CLIPScore"),
            *("LearnedPerceptualImagePatchSimilarity", "PerceptualPathLength"),
            *("CLIPImageQualityAssessment", "BERTScore", "InfoLM"),
            *("DeepNoiseSuppressionMeanOpinionScore",),
            *("NonIntrusiveSpeechQualityAssessment",),
        ),
        NETWORK,
    ),
    **dict.fromkeys(
        (
            *("PerceptualEvaluationSpeechQuality", "ShortTimeObjectiveIntelligibility"),
            *("SpeechReverberationModulationEnergyRatio", "ROUGEScore"),
            *("VideoMultiMethodAssessmentFusion", "ClusterAccuracy"),
        ),
        "needs another package",
    ),
    **dict.fromkeys(
        ("Metric", "BaseAggregator", "RetrievalMetric", "WrapperMetric"), "abstract"
    ),
}

ERRORS: dict[str, Errors] = {  # where ranks have batches, in place of a result
    "RootMeanSquaredErrorUsingSlidingWindow": (DataError,),  # keeps what is no state
    "NormalizedRootMeanSquaredError": (IndexError,),  # cannot join three (1.9)
}

BY_ITSELF = {  # a test of their own below
    *("FrechetInceptionDistance", "KernelInceptionDistance", "InceptionScore"),
    *("MemorizationInformedFrechetInceptionDistance", "PermutationInvariantTraining"),
    *("ClasswiseWrapper", "MinMaxMetric", "MultioutputWrapper", "MultitaskWrapper"),
    *("MetricInputTransformer", "LambdaInputTransformer", "BinaryTargetTransformer"),
    *("CompositionalMetric", "MetricCollection", "FeatureShare"),
    *("BootStrapper", "Running", "RunningMean", "RunningSum", "MetricTracker"),
}


def classes() -> dict[str, type]:
    """Return the classes of torchmetrics, without those of a `task=` argument."""
    found: dict[str, type] = {"MetricTracker": tm.MetricTracker}
    for module in pkgutil.walk_packages(tm.__path__, "torchmetrics."):
        if ".functional" in module.name or "._" in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if not isinstance(value, type) or name.startswith("_"):
                continue
            is_metric = issubclass(value, tm.Metric | tm.MetricCollection)
            is_choice = "_ClassificationTaskWrapper" in str(value.__mro__)
            if is_metric and value.__module__ == module.name and not is_choice:
                found.setdefault(name, value)
    return found


CLASSES = classes()


def cases_of(name: str) -> Iterator[tuple[Draw, dict[str, Any]]]:
    if name in OTHERS:
        draw, choices = OTHERS[name]
        yield from ((draw, kinds) for kinds in choices)
        return
    kind = next(it for it in KINDS if name.startswith(it))
    draw, kinds = KINDS[kind]
    rest = name.removeprefix(kind)
    kinds = {**kinds, **ARGUMENTS.get(rest, {})}
    if rest in ("GroupStatRates", "Fairness"):
        draw = binary_groups
    if rest == "ExactMatch":
        draw = grid if kind == "Multiclass" else multilabel_grid
    yield draw, kinds
    signature = importlib.import_module("inspect").signature(CLASSES[name].__init__)
    more = signature.parameters
    if "thresholds" in more:
        yield draw, {**kinds, "thresholds": 7}
    is_choice = "average" in more and rest != "LogAUC"
    if is_choice and kind != "Binary":
        takes_micro = rest not in ("AUROC", "AveragePrecision", "LogAUC")
        is_curve = rest in ("EER", "ROC", "PrecisionRecallCurve")
        yield draw, {**kinds, "average": "macro" if is_curve else "none"}
        yield draw, {**kinds, "average": "micro" if takes_micro else "weighted"}
    if "multidim_average" in more:
        draws = {"Multiclass": grid, "Multilabel": multilabel_grid}
        of_grid = draws.get(kind, lambda g, n: (rand(g, n, 6), ints(g, 2, n, 6)))
        yield of_grid, {**kinds, "multidim_average": "samplewise"}


def all_cases() -> list[Any]:
    found = []
    for name in sorted({*CLASSES} - {*LEFT_OUT, *BY_ITSELF}):
        for place, (draw, kinds) in enumerate(cases_of(name)):
            found.append(pytest.param(name, draw, kinds, id=f"{name}-{place}"))
    return found


def test_every_class_has_a_case_or_a_reason() -> None:
    known = {*OTHERS, *LEFT_OUT, *BY_ITSELF}
    others = {it for it in CLASSES if it not in known and not it.startswith((*KINDS,))}
    assert not others
    assert not known - {*CLASSES}


# --- ranks ------------------------------------------------------------------------


def deals() -> Iterator[list[int]]:
    """Yield to which rank each batch goes; ranks without one, and rank zero, too."""
    draw = random.Random(0)
    for num in (1, 2, 3, 5, 8):
        yield [batch % num for batch in range(len(SIZES))]
    yield [2] * len(SIZES)
    yield [1, 1, 1, 3, 3, 3]
    yield [draw.randrange(5) for _ in SIZES]


def update(metric: Any, batch: Batch) -> None:
    *args, last = batch
    if isinstance(last, dict) and not isinstance(args[0], dict):
        metric.update(*args, last)
    else:
        metric.update(*batch)


def joined(make: Make, batches: list[Batch], ranks: list[int], num: int) -> Any:
    metrics = [TorchMetric("m", make(), "cpu", is_exact=False) for _ in range(num)]
    for number, (batch, rank) in enumerate(zip(batches, ranks, strict=True)):
        for metric in metrics:  # each step has a batch on every rank, perhaps empty
            if metric is metrics[rank]:
                metric.begin_batch(number)
                update(metric.metric, copy.deepcopy(batch))
    torch.manual_seed(0)  # of those that draw subsets
    return metrics[0].compute([metric.state() for metric in metrics])


def alone(metric: Any, batches: list[Batch]) -> Any:
    for batch in batches:
        update(metric, copy.deepcopy(batch))
    torch.manual_seed(0)
    return metric.compute()


def check_same(
    make: Make, draw: Draw, errors: Errors = (), atol: float = 1e-12
) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [draw(g, size) for size in SIZES]
    summed = TorchMetric("m", make(), "cpu", is_exact=False).metric
    expected = alone(summed, batches)
    check_close(expected, alone(make(), batches), 1e-5)  # float32, as it is by default
    for ranks in deals():
        with contextlib.suppress(*errors):
            found = joined(make, batches, ranks, max(ranks) + 2)
            check_close(found, expected, atol)


def check_close(found: Any, expected: Any, atol: float) -> None:
    found, expected = leaves_of(found), leaves_of(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.as_tensor(it, dtype=torch.float64) for it in (a, b))
        torch.testing.assert_close(a, b, rtol=atol, atol=atol, equal_nan=True)


@pytest.mark.parametrize(("name", "draw", "kinds"), all_cases())
def test_ranks_together_have_the_result_of_one_process(
    name: str, draw: Draw, kinds: dict[str, Any]
) -> None:
    check_same(lambda: CLASSES[name](**kinds), draw, ERRORS.get(name, ()))


# --- metrics of metrics, and of networks ------------------------------------------


def accuracy(**kinds: Any) -> Any:
    return tm.classification.MulticlassAccuracy(C, **kinds)


def auroc() -> Any:
    return tm.classification.MulticlassAUROC(C)


class Features(nn.Module):
    """In place of the Inception network."""

    num_features = 6

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 18).reshape(3, 6))

    def forward(self, images: Tensor) -> Tensor:
        return images.float().mean((2, 3)) @ self.weight


def two_tasks(g: torch.Generator, n: int) -> Batch:
    found = multiclass(g, n), values(g, n)
    first, second = ({"a": a, "b": b} for a, b in zip(*found, strict=True))
    return first, second


def real_or_not(g: torch.Generator, n: int) -> Batch:
    is_real = bool(ints(g, 2).item())
    return ints(g, 256, 2 * n, 3, 16, 16).byte(), is_real


WRAPPERS: dict[str, tuple[Make, Draw]] = {
    "ClasswiseWrapper": (
        lambda: tm.wrappers.ClasswiseWrapper(accuracy(average=None)),
        multiclass,
    ),
    "ClasswiseWrapper of curves": (
        lambda: tm.wrappers.ClasswiseWrapper(
            tm.classification.MulticlassAUROC(C, average=None)
        ),
        multiclass,
    ),
    "MinMaxMetric": (lambda: tm.wrappers.MinMaxMetric(auroc()), multiclass),
    "MultioutputWrapper": (
        lambda: tm.wrappers.MultioutputWrapper(tm.SpearmanCorrCoef(), 2),
        pairs,
    ),
    "MultitaskWrapper": (
        lambda: tm.wrappers.MultitaskWrapper(
            {
                "a": tm.MetricCollection(
                    [accuracy(), tm.classification.MulticlassRecall(C), auroc()]
                ),
                "b": tm.PearsonCorrCoef(),
            }
        ),
        two_tasks,
    ),
    "LambdaInputTransformer": (
        lambda: tm.wrappers.LambdaInputTransformer(auroc(), lambda x: x**2),
        multiclass,
    ),
    "MetricInputTransformer": (
        lambda: CLASSES["MetricInputTransformer"](auroc()),
        multiclass,
    ),
    "BinaryTargetTransformer": (
        lambda: tm.wrappers.BinaryTargetTransformer(
            tm.classification.BinaryAUROC(), threshold=0.6
        ),
        values,
    ),
    "CompositionalMetric": (lambda: accuracy() * 2 + auroc() / 3, multiclass),
    "PermutationInvariantTraining": (
        lambda: tm.audio.PermutationInvariantTraining(
            tm.functional.audio.scale_invariant_signal_noise_ratio
        ),
        sources,
    ),
    "FrechetInceptionDistance": (
        lambda: CLASSES["FrechetInceptionDistance"](
            Features(), input_img_size=(3, 16, 16)
        ),
        real_or_not,
    ),
    "KernelInceptionDistance": (
        lambda: CLASSES["KernelInceptionDistance"](
            Features(), subsets=5, subset_size=6
        ),
        real_or_not,
    ),
    "MemorizationInformedFrechetInceptionDistance": (
        lambda: CLASSES["MemorizationInformedFrechetInceptionDistance"](Features()),
        real_or_not,
    ),
    "InceptionScore": (
        lambda: CLASSES["InceptionScore"](Features()),
        lambda g, n: real_or_not(g, n)[:1],
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_metrics_of_metrics_and_networks_have_the_result_of_one_process(
    name: str,
) -> None:
    make, draw = WRAPPERS[name]
    check_same(make, draw)


def test_what_a_reset_keeps_is_joined_once() -> None:
    g = torch.Generator().manual_seed(1)
    real, fake = (ints(g, 256, 12, 3, 16, 16).byte() for _ in range(2))
    metrics = [
        TorchMetric("fid", make(), "cpu", is_exact=False)
        for make in 2
        * [
            lambda: CLASSES["FrechetInceptionDistance"](
                Features(), reset_real_features=False, input_img_size=(3, 16, 16)
            )
        ]
    ]
    found = []
    for epoch in range(3):
        for rank, metric in enumerate(metrics):
            metric.reset()
            metric.begin_batch(rank)
            if not epoch:
                metric.metric.update(real[6 * rank : 6 * rank + 6], real=True)
            metric.metric.update(fake[6 * rank : 6 * rank + 6], real=False)
        found.append(metrics[0].compute([metric.state() for metric in metrics]))
    assert found[0] == found[1] == found[2]


def test_a_network_in_a_metric_keeps_its_dtype() -> None:
    metric = CLASSES["FrechetInceptionDistance"](Features(), input_img_size=(3, 16, 16))
    TorchMetric("fid", metric, "cpu", is_exact=False)
    assert metric.inception.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: tm.wrappers.BootStrapper(accuracy()),
        lambda: tm.wrappers.Running(tm.SumMetric(), window=3),
        lambda: tm.aggregation.RunningMean(window=3),
        lambda: tm.wrappers.MetricTracker(accuracy()),
        lambda: tm.wrappers.MinMaxMetric(tm.aggregation.RunningSum(window=2)),
    ],
)
def test_a_metric_of_one_process_is_refused(make: Make) -> None:
    with pytest.raises(UsageError, match="depends on the number of ranks"):
        TorchMetric("m", make(), "cpu", is_exact=False)


# --- what cannot be joined --------------------------------------------------------


class Own(tm.Metric):
    """The mean of values, kept in any way."""

    def __init__(self, **states: Any) -> None:
        super().__init__()
        for name, reduction in states.items():
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx=reduction)

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.sum()
        self.num = self.num + len(values)

    def compute(self) -> Tensor:
        return torch.as_tensor(self.total / self.num)


class Unregistered(Own):
    def __init__(self) -> None:
        super().__init__(total="sum")
        self.num = 0


class Buffered(Own):
    def __init__(self) -> None:
        super().__init__(total="sum")
        self.register_buffer("num", torch.zeros(()))


class Listed(Own):
    """Keeps values in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.values).mean()


class Biased(Own):
    def __init__(self) -> None:
        super().__init__(total="sum")
        self.add_state("num", torch.tensor(1.0), dist_reduce_fx="sum")


class Holder(tm.Metric):
    def __init__(self) -> None:
        super().__init__()
        self.inner = [tm.MeanMetric()]

    def update(self, values: Tensor) -> None:
        self.inner[0].update(values)

    def compute(self) -> Tensor:
        return self.inner[0].compute()


def test_a_metric_of_ones_own_with_sums_is_joined() -> None:
    check_same(lambda: Own(total="sum", num="sum"), one)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Own(total="mean", num="mean"), "'total' is a mean by ranks"),
        (lambda: Own(total=None, num=None), "without dist_reduce_fx"),
        (lambda: Own(total="sum", num=None), "without dist_reduce_fx"),
        (Unregistered, "keeps 'num', which is no state"),
        (Buffered, "keeps 'num', which is no state"),
        (Listed, "keeps 'values', which is no state"),
        (Biased, "'num' is a sum that begins with 1.0"),
    ],
)
@pytest.mark.parametrize("ranks", [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 2]])
def test_what_depends_on_the_number_of_ranks_is_an_error(
    make: Make, message: str, ranks: list[int]
) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [one(g, size) for size in SIZES]
    with pytest.raises(DataError, match=message):
        joined(make, batches, ranks, 3)


def test_what_only_rank_one_has_is_not_lost() -> None:
    with pytest.raises(DataError, match="keeps 'num', which is no state"):
        joined(Unregistered, [one(torch.Generator(), 3)], [1], 2)


def test_metrics_that_are_not_found_are_refused() -> None:
    with pytest.raises(UsageError, match="expected a ModuleList"):
        TorchMetric("m", Holder(), "cpu", is_exact=False)


@pytest.mark.parametrize(
    ("make", "is_refused"),
    [
        (tm.MeanSquaredError, True),
        (tm.PearsonCorrCoef, True),
        (tm.SpearmanCorrCoef, False),
        (auroc, False),
        (accuracy, False),
        (tm.MaxMetric, False),
        (lambda: accuracy() + tm.MeanSquaredError(), True),
    ],
)
def test_where_bits_must_be_the_same_sums_of_floating_point_numbers_are_refused(
    make: Make, is_refused: bool
) -> None:
    if is_refused:
        with pytest.raises(UsageError, match="Expected a metric that counts"):
            TorchMetric("m", make(), "cpu", is_exact=True)
    else:
        TorchMetric("m", make(), "cpu", is_exact=True)


def test_other_states_on_a_rank_are_an_error() -> None:
    first, second = (
        TorchMetric("m", make(), "cpu", is_exact=False)
        for make in (tm.SumMetric, lambda: tm.MeanSquaredError())
    )
    first.metric.update(torch.ones(2))
    second.metric.update(torch.ones(2), torch.zeros(2))
    message = "'m' differs between ranks: SumMetric on rank 0, MeanSquaredError on"
    with pytest.raises(DataError, match=message):
        first.compute([first.state(), second.state()])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (torch.tensor([[2]]), {"m": 2}),
        (torch.tensor([1.0, 2.0]), {"m_0": 1, "m_1": 2}),
        (torch.eye(3), {}),
        (np.float32(2), {"m": 2}),
        (np.arange(2), {"m_0": 0, "m_1": 1}),
        (True, {"m": 1}),
        ((torch.tensor(1.0), 2.0), {"m_0": 1, "m_1": 2}),
        ((torch.ones(3), torch.ones(3)), {}),
        ({"m_50": 1.0, "a": {"b": 2}}, {"m_50": 1, "m_a_b": 2}),
        ("no number", {}),
    ],
)
def test_numbers_of_a_result(result: Any, expected: dict[str, float]) -> None:
    assert dict(numbers_of("m", result)) == expected
