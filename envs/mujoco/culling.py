"""Frustum culling: leaves out what a camera cannot see, without changing its image.

MuJoCo draws every mesh for every camera, and all of them again for a mirror, however weak and
however well hidden: without a GPU that is most of a step.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

_MARGIN = 0.01
"""Meters by which spheres are taken for larger than they are."""

_OPAQUE = 0.995
"""Least alpha of what hides the things behind it; MuJoCo blends what has less."""


@dataclass(frozen=True, kw_only=True)
class Frustum:
    """Pose and opening of a camera that looks along its own -z axis."""

    position: np.ndarray
    """(3,) in meters, of the world like everything here."""

    axes: np.ndarray
    """(3, 3) whose columns point right, up and back."""

    tangents: np.ndarray
    """(2,) of half the angle across and upwards."""

    near: float
    """Least depth that is drawn, in meters."""

    def misses(self, centers: np.ndarray, radii: np.ndarray) -> np.ndarray:
        """Return which spheres (N,) lie outside, of centers (N, 3) and radii (N,)."""
        radii = radii + _MARGIN
        local = (centers - self.position) @ self.axes
        depth = -local[:, 2]
        slack = radii[:, None] * np.sqrt(1 + self.tangents**2)
        beside: np.ndarray = np.abs(local[:, :2]) > depth[:, None] * self.tangents + slack
        outside: np.ndarray = beside.any(axis=1) | (depth < -radii)
        return outside

    @property
    def corners(self) -> np.ndarray:
        """Rays (4, 3) through the corners of the image; their depth is 1."""
        across, up = self.tangents
        signs = np.array([(-1, -1), (-1, 1), (1, -1), (1, 1)])
        local = np.column_stack([signs * (across, up), -np.ones(4)])
        rays: np.ndarray = local @ self.axes.T
        return rays

    def closeness(self, point: np.ndarray, normal: np.ndarray) -> np.ndarray:
        """Return one over the depths (4,) at which the corners meet the plane through ``point``.

        Negative where they meet it behind the camera; infinite where the camera lies in it.
        """
        height = (point - self.position) @ normal
        if abs(height) < _MARGIN:
            return np.full(4, np.inf)
        found: np.ndarray = self.corners @ normal / height
        return found


def culled(sim: Any, camera: int, aspect: float) -> AbstractContextManager[None]:
    """Draw only what shows in a fixed camera's image, of ``aspect`` width by height.

    Args:
        sim: robosuite's, with a drawing context.
        camera: Its number.
        aspect: Width of the image by its height.
    """
    context = sim._render_context_offscreen
    model, data = sim.model._model, sim.data._data
    return culled_scene(model, data, context.vopt, context.scn, camera, aspect)


@contextmanager
def culled_scene(  # noqa: PLR0913 (MuJoCo's four parts of a drawing)
    model: Any, data: Any, options: Any, scene: Any, camera: int, aspect: float
) -> Iterator[None]:
    """Draw as :func:`culled` does, by MuJoCo alone.

    Args:
        model: MuJoCo's, as all of these.
        data: Where things are.
        options: Which groups are drawn (``MjvOption``).
        scene: What is drawn into (``MjvScene``).
        camera: Its number.
        aspect: Width of the image by its height.
    """
    import mujoco

    drawn = np.array(options.geomgroup)[model.geom_group] == 1
    unseen, no_mirror = _hidden(model, data, drawn, camera, aspect)
    groups = model.geom_group.copy()
    flag = mujoco.mjtRndFlag.mjRND_REFLECTION
    mirrored = scene.flags[flag]
    try:
        # MuJoCo skips the last group unless somebody asks for it.
        model.geom_group[unseen] = mujoco.mjNGROUP - 1
        if no_mirror:
            scene.flags[flag] = 0
        yield
    finally:
        model.geom_group[:] = groups
        scene.flags[flag] = mirrored


def _hidden(
    model: Any, data: Any, drawn: np.ndarray, camera: int, aspect: float
) -> tuple[np.ndarray, bool]:
    """Return which geoms (N,) cannot show, and whether no mirror shows anything."""
    if (model.light_castshadow & model.light_active).any() or model.cam_sensorsize[camera].any():
        # A shadow comes from anywhere, and a lens of its own is drawn by other rules.
        return np.zeros(model.ngeom, bool), False
    view = _view(model, data, camera, aspect)
    # What has no radius has no end.
    outside = view.misses(data.geom_xpos, model.geom_rbound) & (model.geom_rbound > 0)
    mirrors = drawn & _reflective(model)
    # A mirror stays even where it does not show: MuJoCo has one at most, the first.
    unseen = outside & ~mirrors
    surfaces = [_surface(model, data, i) for i in np.flatnonzero(mirrors & ~outside).tolist()]
    showing = [one for one in surfaces if not _covered(view, model, data, drawn & ~mirrors, one)]
    for point, normal in showing:
        heights = (data.geom_xpos - point) @ normal
        images = data.geom_xpos - 2 * heights[:, None] * normal
        unseen &= view.misses(images, model.geom_rbound)
    return unseen, not showing


def _view(model: Any, data: Any, camera: int, aspect: float) -> Frustum:
    upwards = np.tan(np.deg2rad(model.cam_fovy[camera]) / 2)
    return Frustum(
        position=data.cam_xpos[camera],
        axes=data.cam_xmat[camera].reshape(3, 3),
        tangents=np.array([aspect * upwards, upwards]),
        near=model.vis.map.znear * model.stat.extent,
    )


_PLANE, _BOX = 0, 6
"""mujoco.mjtGeom, as numbers of the arrays; mujoco itself may only be imported late."""


def _reflective(model: Any) -> np.ndarray:
    of_material: np.ndarray = np.append(model.mat_reflectance, 0)[model.geom_matid] > 0
    return of_material & np.isin(model.geom_type, (_PLANE, _BOX))


def _surface(model: Any, data: Any, geom: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a point (3,) and the normal (3,) of a plane, or of the upper face of a box."""
    normal = data.geom_xmat[geom].reshape(3, 3)[:, 2]
    rise = model.geom_size[geom][2] if model.geom_type[geom] == _BOX else 0
    return data.geom_xpos[geom] + rise * normal, normal


def _covered(
    view: Frustum,
    model: Any,
    data: Any,
    drawn: np.ndarray,
    surface: tuple[np.ndarray, np.ndarray],
) -> bool:
    """Return whether the upper face of one opaque box fills the image before a surface does.

    The face is convex, so it fills the image if all four corners meet it; one over the depth of a
    plane is linear in the image, so what holds at the corners holds everywhere.
    """
    alpha = np.minimum(model.geom_rgba[:, 3], np.append(model.mat_rgba[:, 3], 1)[model.geom_matid])
    boxes = drawn & (model.geom_type == _BOX) & (alpha >= _OPAQUE)
    behind = np.maximum(view.closeness(*surface), 0)
    for box in np.flatnonzero(boxes).tolist():
        middle, upwards = _surface(model, data, box)
        closeness = view.closeness(middle, upwards)
        in_front = (view.position - middle) @ upwards > _MARGIN and (closeness > behind).all()
        if not in_front or (closeness * view.near >= 1).any():
            continue
        met = view.position + view.corners / closeness[:, None] - middle
        axes = data.geom_xmat[box].reshape(3, 3)[:, :2]
        if (np.abs(met @ axes) <= model.geom_size[box][:2] - _MARGIN).all():
            return True
    return False
