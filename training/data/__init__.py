"""LeRobot recordings as training batches.

From folders to batches::

    source = SourceSpec(paths=(path,), embodiment=robot, metadata="metadata.json")
    data = TrainingData.open([source], seed=0, options=ReaderOptions())
    plan = LoaderPlan(global_batch=8, micro_batch=2, rank=0, world_size=2, stop_step=1000)
    for batch in build_loader(data, plan, LoaderOptions(num_workers=4)):
        images = encode_views(batch, data, augment=PUBLISHED, device="cuda")  # (B, T, H', W', 3)

``build_loader`` yields one micro-batch after the other: all ``plan.parts`` accumulation parts of
``start_step``, then those of the next step, up to (not including) ``stop_step``. The slot of sample
``j`` in part ``a`` of rank ``r`` is ``(a * world_size + r) * micro_batch + j``: the whole global
batch depends on ``(seed, step)`` alone, never on ranks or workers, so a run resumes from one
integer. Per-source horizons may differ: blocks are filled up with masked rows to the longest.

A batch is a dictionary (B samples, S anchors, A = S * longest horizon actions, T frames):

``views``            ``{source: {video key: uint8 (b, T, H, W, 3)}}`` as recorded, in the order of
                     the rows with that ``source``; :func:`encode_views` joins them
``state``            float32 (B, S, 64), normalized and padded; ``state_mask`` bool, same shape
``action``           float32 (B, A, 32), normalized and padded; ``action_mask`` bool, same shape
``has_real_action``  bool (B,)
``prompt``           list of B strings
``sample_id``        int64 (B,): ``epoch * windows + window``, the key of all that is random in a
                     sample; ``data.describe(sample_id)`` says where it comes from
``source``           int64 (B,): index into ``data.sources``, each with ``pipeline`` and ``spec``
``slot``             int64 (B,): place in the global batch; ``step``: int
``skipped``          int: unreadable windows that were replaced (``damaged="count"``)
"""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if TYPE_CHECKING:
    from dzrobot.training.data.dataset import DatasetReader, EpisodeSelection, ReaderOptions
    from dzrobot.training.data.loader import (
        CollatedBatch,
        LoaderOptions,
        LoaderPlan,
        build_loader,
        collate,
        encode_views,
        read_batches,
    )
    from dzrobot.training.data.mixture import SampleKey, SourceSpec, TrainingData

__all__ = [
    "CollatedBatch",
    "DatasetReader",
    "EpisodeSelection",
    "LoaderOptions",
    "LoaderPlan",
    "ReaderOptions",
    "SampleKey",
    "SourceSpec",
    "TrainingData",
    "build_loader",
    "collate",
    "encode_views",
    "read_batches",
]

# Batches are of torch; what a recording holds is read without it, on a robot's machine too.
__getattr__, __dir__ = lazy_exports(__name__)
