"""LeRobot recordings as training batches.

From folders to batches::

    data = TrainingData.open([SourceSpec(paths=(path,), embodiment=robot, statistics=stats)], DataOptions(seed=0))
    plan = LoaderPlan(global_batch=8, micro_batch=2, rank=0, world_size=2, start_step=0, stop_step=1000)
    for batch in build_loader(data, plan, LoaderOptions(num_workers=4)):
        images = encode_views(batch, data, augmentation)     # (B, T, H, W, 3) uint8 on the device

``build_loader`` yields one micro-batch after the other: all accumulation parts of ``start_step``, then those of the
next step, up to (not including) ``stop_step``. The slot of sample ``j`` in part ``a`` of rank ``r`` is
``(a * world_size + r) * micro_batch + j``: the whole global batch depends on ``(seed, step)`` alone, never on ranks
or workers, so a run resumes from one integer.

A batch is a dictionary (B samples; S anchors; A = blocks * horizon actions; T frames):

=================  ==================================================================================================
``views``          ``{source: {video key: uint8 (b, T, H, W, 3)}}`` at recorded resolution, in the order of the rows
                   with that ``source``; :func:`encode_views` turns them into one ``(B, T, H', W', 3)`` uint8 tensor
``state``          float32 (B, S, 64) normalised and padded; ``state_mask`` bool, same shape
``action``         float32 (B, A, 32) normalised and padded; ``action_mask`` bool, same shape
``has_real_action``  bool (B,)
``prompt``         list of B strings
``sample_id``      int64 (B,): ``epoch * windows + window``, the key of everything random about a sample
``source``         int64 (B,): index into ``data.sources``
``slot``           int64 (B,): place in the global batch; ``step``: int
``skipped``        int: windows that could not be read and were replaced (policy ``on_corrupt="count"``)
=================  ==================================================================================================
"""
