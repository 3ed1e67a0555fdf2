"""What live images and states are, if not the recorded ones: turned, exchanged, in other units.

Plain arithmetic. Changes are compared with each other, not with a limit: what tells is that one of
them fits and the input as it is does not.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice, product

import cv2
import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.uint8]
Floats = NDArray[np.float64]
_Pairs = Sequence[tuple[Image, Image]]
_Change = tuple[float, str, _Pairs]
_Floats = tuple[NDArray[np.float32], NDArray[np.float32]]

SIDE = 128
"""Pixels at which images are compared: more are shrunk."""

CLEARLY = 0.6
"""Share of the difference as it is below which another variant is the one that fits."""

SAME_IMAGE = 1.0
"""Difference of 255 below which nothing is looked for."""

OTHER_IMAGE = 12.0
"""Difference of 255 above which images differ although no variant fits."""

SAME_STATE = 0.5
"""Difference of a state number, in deviations of the data, below which it is the recorded one."""

LATEST = 6
"""Recorded steps, from the newest back, that a live image may be of."""

_FINE = 64
_SAME_PIXEL = 6.0
_OTHER_PIXEL = 20.0
_LEAST_PART = 0.01
_MOST_SAME = 0.5
_ALL = 0.9
_REACH = 0.35
_ROUNDS = 60
_STILL = 1e-5
_BLUR = 5
_INSIDE = 0.99
_MOST_ZOOM = 1.7
_LEAST_SEEN = 0.4
_SHIFTED = 0.01
_TURNED = 1.0
_ZOOMED = 0.02
_TINTED = 0.1
_ANOTHER = "something else, however it is changed"
_FITS_STATE = 0.2
_CONSTANT = 2.0
_STATIC = 0.05
_FEW_DEVIATIONS = 1e-3


@dataclass(frozen=True)
class Reference:
    """What to call the images that others are compared with."""

    view: str = "what was recorded as {}"
    """Phrase for one of them, given its view."""

    one: str = "the recorded one"
    """Phrase for the one of the same view."""


RECORDED = Reference()
RENDERED = Reference("what the environment's {} shows", "the environment's")


@dataclass(frozen=True, kw_only=True)
class ImageFit:
    """How one recorded view compares with what is seen live."""

    as_is: float
    """Mean difference of 255."""

    best: float
    """The same, of the variant that fits best."""

    words: str
    """That variant, as what the live image is; empty: as recorded."""

    fitted: Image | None = None
    """The first recorded image changed so, (SIDE, SIDE, 3); None: as recorded, or nothing fits."""

    @property
    def is_variant(self) -> bool:
        """Return whether a change of the recorded image explains the live one."""
        return bool(self.words) and self.words != _ANOTHER


def fit_images(
    key: str,
    recorded: Sequence[Mapping[str, Image]],
    live: Sequence[Mapping[str, Image]],
    *,
    same_place: bool = False,
    reference: Reference = RECORDED,
) -> ImageFit:
    """Return what the live view ``key`` is, at moments that were recorded.

    Args:
        key: Which view.
        recorded: All recorded views (H, W, 3), by moment.
        live: The same of what is seen.
        same_place: Whether both began at one start: then what differs in part is something else.
        reference: What to call those in ``recorded``, where they were not recorded.
    """
    # Other resolutions and places of the camera are not tried where images are small anyway.
    fine = min(one[key].shape[0] for one in (*recorded, *live)) >= _FINE
    theirs = [_small(one[key]) for one in live]
    ours = [{name: _small(image) for name, image in one.items()} for one in recorded]
    as_is = _apart([one[key] for one in ours], theirs)
    if as_is < SAME_IMAGE:
        return ImageFit(as_is=as_is, best=as_is, words="")
    if max(float(image.std()) for image in theirs) < _CONSTANT:
        return ImageFit(as_is=as_is, best=as_is, words="one color throughout")
    pairs = [(one[key], image) for one, image in zip(ours, theirs, strict=True)]
    named = partial(_named, key, reference)
    turned = list(_changed(named, ours, theirs, _turned()))
    cut = _changed(named, ours, theirs, _cut(fine=fine))
    undone = _undone(pairs, reference.one, fine=fine)
    best, words, changed = min((*turned, *cut, *undone), key=_simplest)
    fits = bool(words) and best < CLEARLY * as_is
    if fine:
        left, where, there = _elsewhere(pairs, turned)
        # What is in the list is what people do, so it takes more to be refuted.
        if left < CLEARLY * (CLEARLY * best if fits else as_is):
            return ImageFit(as_is=as_is, best=left, words=where, fitted=there[0][0])
    if fits:
        return ImageFit(as_is=as_is, best=best, words=words, fitted=changed[0][0])
    # A codec may add a little everywhere.
    for left, words in islice(_lit(pairs), 2 if as_is > OTHER_IMAGE else 1):
        if left < CLEARLY * as_is:
            return ImageFit(as_is=as_is, best=left, words=words)
    if same_place and (words := _in_part(pairs)):
        return ImageFit(as_is=as_is, best=best, words=words)
    other = _ANOTHER if as_is > OTHER_IMAGE else ""
    return ImageFit(as_is=as_is, best=best, words=other)


def _simplest(change: _Change) -> tuple[float, int]:
    """Return what changes are ordered by: of a symmetric image, the fewest words come first."""
    return round(change[0], 1), len(change[1])


def _changed(
    named: Callable[[str, str], str],
    ours: Sequence[Mapping[str, Image]],
    theirs: Sequence[Image],
    changes: Iterable[tuple[str, Callable[[Image], Image]]],
) -> Iterator[_Change]:
    """Yield changes of every view: what is left, what the live image is by it, the images then."""
    for name, (words, change) in product(ours[0], changes):
        yield _change(named(name, words), [change(one[name]) for one in ours], theirs)


def _change(words: str, recorded: Sequence[Image], live: Sequence[Image]) -> _Change:
    return _apart(recorded, live), words, list(zip(recorded, live, strict=True))


def _elsewhere(pairs: _Pairs, turned: Iterable[_Change]) -> _Change:
    """Return how live images show the recorded scene elsewhere, turned before where that is it."""
    left, where = _moved(pairs)
    _, before, aligned = min(turned, key=_simplest)
    both, there = _moved(aligned) if before else (left, where)
    if both < CLEARLY * left:
        return both, f"{before}, {there}", aligned
    return left, where, pairs


def _moved(pairs: _Pairs) -> tuple[float, str]:
    """Return what is left where live images show the recorded scene elsewhere, and where.

    The best shift by whole pixels, or what an affine map makes of it.
    """
    both = [(a.astype(np.float32), b.astype(np.float32)) for a, b in pairs]
    shift = np.zeros(2, np.intp)
    for side, reach in ((SIDE // 4, round(_REACH * SIDE / 4)), (SIDE, 4)):
        small = [(cv2.resize(a, (side, side)), cv2.resize(b, (side, side))) for a, b in both]
        middle = shift * side // SIDE
        tried = [middle + way for way in product(range(-reach, reach + 1), repeat=2)]
        shift = min(tried, key=partial(_left_of, small)) * SIDE // side
    begin = np.array([[1, 0, shift[0]], [0, 1, shift[1]]], np.float64)
    found = [begin, *_refined(both[0], begin)]
    left, matrix = min(((_warped(both, one), one) for one in found), key=lambda one: one[0])
    words = _placed(matrix)
    return (left, words) if words else (float("inf"), "")


def _left_of(pairs: Sequence[_Floats], shift: NDArray[np.intp]) -> float:
    """Return the difference where shifted recorded images and live ones overlap, over its share."""
    side, (across, down) = len(pairs[0][0]), shift
    apart = [
        np.abs(
            a[max(-down, 0) : side - max(down, 0), max(-across, 0) : side - max(across, 0)]
            - b[max(down, 0) : side + min(down, 0), max(across, 0) : side + min(across, 0)]
        ).mean()
        for a, b in pairs
    ]
    return float(np.mean(apart) / (1 - abs(across) / side) / (1 - abs(down) / side))


def _refined(pair: _Floats, begin: Floats) -> Iterator[Floats]:
    """Yield the affine map that begins with ``begin``, where one is found."""
    ours, theirs = (image.mean(-1) for image in pair)
    inside = cv2.warpAffine(np.full((SIDE, SIDE), 255, np.uint8), begin, (SIDE, SIDE))
    enough = (cv2.TERM_CRITERIA_COUNT | cv2.TERM_CRITERIA_EPS, _ROUNDS, _STILL)
    with suppress(cv2.error):  # It does not converge where there is nothing to be found.
        _, found = cv2.findTransformECC(
            ours, theirs, begin.astype(np.float32), cv2.MOTION_AFFINE, enough, inside, _BLUR
        )
        yield np.asarray(found, np.float64)


def _warped(pairs: Sequence[_Floats], matrix: Floats) -> float:
    """Return how far live images, mapped back, are from recorded ones, over the share in view."""
    back = partial(
        cv2.warpAffine, M=matrix, dsize=(SIDE, SIDE), flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    )
    seen = back(np.ones((SIDE, SIDE), np.float32)) > _INSIDE
    zoom = np.abs(np.log(np.hypot(*matrix[:, :2]))).max()
    if zoom > np.log(_MOST_ZOOM) or seen.mean() < _LEAST_SEEN:
        return float("inf")
    return float(np.mean([np.abs(a - back(b))[seen].mean() for a, b in pairs]) / seen.mean())


def _placed(matrix: Floats) -> str:
    """Return what a map (2, 3) from recorded to live pixels does; empty: nothing that is seen."""
    middle = np.full(2, (SIDE - 1) / 2)
    across, down = (matrix[:, :2] @ middle + matrix[:, 2] - middle) / SIDE
    wide, high = np.hypot(*matrix[:, :2])
    turned = np.degrees(np.arctan2(matrix[1, 0] - matrix[0, 1], matrix[0, 0] + matrix[1, 1]))
    ways = [(across, "to the right", "to the left"), (down, "downwards", "upwards")]
    said = [
        f"shifted by {100 * abs(far):.0f} % {more if far > 0 else less}"
        for far, more, less in ways
        if abs(far) >= _SHIFTED
    ]
    if abs(turned) >= _TURNED:
        said.append(
            f"turned by {abs(turned):.0f} degrees to the {'right' if turned > 0 else 'left'}"
        )
    if abs(wide / high - 1) >= _ZOOMED:
        said.append(f"{wide:.2f} times as wide and {high:.2f} times as high")
    elif abs(wide - 1) >= _ZOOMED:
        said.append(f"{wide:.2f} times as large")
    return ", ".join(said)


def _lit(pairs: _Pairs) -> Iterator[tuple[float, str]]:
    """Yield what is left between recorded and live images in other light, and in which."""
    ours, theirs = (np.stack(images).astype(np.float32) for images in zip(*pairs, strict=True))

    def left(guess: Floats) -> float:
        return float(np.abs(np.clip(guess, 0, 255) - theirs).mean())

    factors = (ours * theirs).sum((0, 1, 2)) / np.maximum((ours * ours).sum((0, 1, 2)), 1.0)
    words = "{:.2g} times as red, {:.2g} as green and {:.2g} as blue".format(*factors)
    if np.ptp(factors) < _TINTED * factors.mean():
        words = f"{factors.mean():.2g} times as bright"
    yield left(factors * ours), words
    contrast, added = np.polyfit(ours.ravel(), theirs.ravel(), 1)
    words = f"at {contrast:.2g} times the contrast, {abs(added):.0f} of 255 "
    yield left(contrast * ours + added), words + ("brighter" if added > 0 else "darker")


def _in_part(pairs: _Pairs) -> str:
    """Return what differs of images that are otherwise the same; empty: it is not so."""
    apart = np.stack([b.astype(np.float32) - a for a, b in pairs]).mean(-1)
    size = np.abs(apart)
    same, other = float((size < _SAME_PIXEL).mean()), size > _OTHER_PIXEL
    share = float(other.mean())
    if share < _LEAST_PART or same < _MOST_SAME:
        return ""
    darker = float((apart[other] < 0).mean())
    how = "darker" if darker > _ALL else "brighter" if darker < 1 - _ALL else "something else"
    return (
        f"the same in {100 * same:.0f} % of its pixels and {how} in {100 * share:.0f} %: another "
        "version of the simulator, light, background, or objects that stand elsewhere"
    )


def late_by(
    key: str, earlier: Sequence[Sequence[Mapping[str, Image]]], live: Sequence[Mapping[str, Image]]
) -> int:
    """Return by how many steps the live view ``key`` is late; 0: not.

    Args:
        key: Which view.
        earlier: By moment, recorded views 0, 1, 2, ... steps before it.
        live: What is seen at these moments.
    """
    theirs = [_small(one[key]) for one in live]
    steps = range(min(map(len, earlier)))
    apart = [_apart([_small(one[k][key]) for one in earlier], theirs) for k in steps]
    best = int(np.argmin(apart))
    return best if apart[0] > SAME_IMAGE / 2 and apart[best] < CLEARLY * apart[0] else 0


def is_static(key: str, seen: Sequence[Mapping[str, Image]]) -> bool:
    """Return whether the view ``key`` shows the same image at all moments."""
    small = [_small(one[key]) for one in seen]
    return len(small) > 1 and _apart(small[:-1], small[1:]) < _STATIC


def _named(key: str, reference: Reference, name: str, words: str) -> str:
    other = "" if name == key else reference.view.format(name)
    return ", ".join(one for one in (other, words) if one)


def _turned() -> Iterator[tuple[str, Callable[[Image], Image]]]:
    """Yield (words, change): a recorded image that was changed so is a live one."""
    for (turn, orient), (color, recolor) in product(_TURNS.items(), _COLORS.items()):
        words = ", ".join(one for one in (turn, color) if one)
        yield words, lambda image, f=orient, g=recolor: np.ascontiguousarray(g(f(image)))  # type: ignore[misc]


def _cut(*, fine: bool) -> Iterator[tuple[str, Callable[[Image], Image]]]:
    """Yield the same of changes that lose something."""
    for share in (0.95, 0.9, 0.8, 0.7, 0.6):
        yield f"cropped to {100 * share:.0f} %", partial(_cropped, high=share, wide=share)
        yield f"cut at the sides to {100 * share:.0f} %", partial(_cropped, high=1, wide=share)
        yield f"cut above and below to {100 * share:.0f} %", partial(_cropped, high=share, wide=1)
    for ratio in ("4:3", "16:9"):
        wide, high = map(int, ratio.split(":"))
        share = high / wide
        yield f"letterboxed from {ratio}", partial(_boxed, high=share, wide=1)
        yield f"pillarboxed from {high}:{wide}", partial(_boxed, high=1, wide=share)
    for factor in (2, 4) if fine else ():
        yield f"at 1/{factor} of the resolution", partial(_coarse, factor=factor)


def _undone(pairs: _Pairs, one: str, *, fine: bool) -> Iterator[_Change]:
    """Yield, as :func:`_changed` does, changes that make a live image a recorded one."""
    changes: dict[str, Callable[[Image], Image]] = {
        f"not cropped to {100 * share:.0f} %, as {one} is": partial(
            _cropped, high=share, wide=share
        )
        for share in (0.9, 0.8, 0.7, 0.6)
    }
    for factor in (2, 4) if fine else ():
        changes[f"sharper than {one}, {factor} times"] = partial(_coarse, factor=factor)
    changes[f"without the bars of {one} (4:3)"] = partial(_boxed, high=3 / 4, wide=1)
    for words, change in changes.items():
        yield _change(words, [ours for ours, _ in pairs], [change(theirs) for _, theirs in pairs])


_TURNS: Mapping[str, Callable[[Image], Image]] = {
    "": lambda image: image,
    "upside down": lambda image: image[::-1],
    "mirrored": lambda image: image[:, ::-1],
    "turned by 180 degrees": lambda image: image[::-1, ::-1],
    "turned by 90 degrees to the left": lambda image: _small(np.rot90(image)),
    "turned by 90 degrees to the right": lambda image: _small(np.rot90(image, -1)),
}
_COLORS: Mapping[str, Callable[[Image], Image]] = {
    "": lambda image: image,
    "with red and blue exchanged": lambda image: image[..., ::-1],
    "gray": lambda image: np.repeat(image.mean(-1, keepdims=True).astype(np.uint8), 3, -1),
}


def shrunk(image: Image, side: int) -> Image:
    """Return an image (H, W, 3) at ``side`` x ``side`` pixels."""
    whole = np.ascontiguousarray(image)
    small: Image = cv2.resize(whole, (side, side), interpolation=cv2.INTER_AREA).astype(np.uint8)
    return small


def _small(image: Image) -> Image:
    return shrunk(image, SIDE)


def _cropped(image: Image, *, high: float, wide: float) -> Image:
    rows, columns = image.shape[:2]
    top, left = round(rows * (1 - high) / 2), round(columns * (1 - wide) / 2)
    return _small(image[top : rows - top, left : columns - left])


def _boxed(image: Image, *, high: float, wide: float) -> Image:
    rows, columns = image.shape[:2]
    inner = (round(columns * wide), round(rows * high))
    boxed = np.zeros_like(image)
    top, left = (rows - inner[1]) // 2, (columns - inner[0]) // 2
    inside = cv2.resize(image, inner, interpolation=cv2.INTER_AREA)
    boxed[top : top + inner[1], left : left + inner[0]] = inside
    return boxed


def _coarse(image: Image, *, factor: int) -> Image:
    size = (image.shape[1] // factor, image.shape[0] // factor)
    return _small(cv2.resize(image, size, interpolation=cv2.INTER_AREA))


def _apart(recorded: Sequence[Image], live: Sequence[Image]) -> float:
    pairs = zip(recorded, live, strict=True)
    return float(np.mean([np.abs(a.astype(np.float32) - b).mean() for a, b in pairs]))


@dataclass(frozen=True, kw_only=True)
class StateFit:
    """How recorded states compare with live ones."""

    deviations: float
    """Difference of the number that differs most, in deviations of the data."""

    words: str
    """What the live state is; empty: as recorded."""


FACTORS = {
    "the negative of": -1.0, "1000 times": 1000.0, "1/1000 of": 0.001, "100 times": 100.0,
    "1/100 of": 0.01, "in degrees, not radians:": 180 / np.pi,
    "in radians, not degrees:": np.pi / 180, "twice": 2.0, "half of": 0.5,
}  # fmt: skip
"""What numbers are multiplied by that mean the same in other units, or with another sign."""

Together = Callable[[Floats, Floats, NDArray[np.intp]], str]
"""Takes recorded and live states (N, S) and the numbers that differ; returns what is wrong with
several of them together, empty where each is to be looked at by itself."""


def fit_states(
    recorded: Floats,
    live: Floats,
    deviation: Floats,
    together: Together = lambda recorded, live, wrong: "",
) -> StateFit:
    """Return what live states are, at moments that were recorded.

    Args:
        recorded: (N, S).
        live: (N, S), at the same moments.
        deviation: (S,), of the data.
        together: Tried before the numbers one by one.
    """
    scale = np.maximum(deviation, _FEW_DEVIATIONS)
    apart = np.abs(live - recorded) / scale
    worst = apart.max(0)
    wrong = np.flatnonzero(np.median(apart, axis=0) > SAME_STATE)
    if not len(wrong):
        return StateFit(deviations=float(worst.max()), words="")
    words = together(recorded, live, wrong) or explain_numbers(recorded, live, scale, wrong)
    if np.abs(live[:, wrong]).max() < 1e-9:
        words = said_of(wrong, "are 0 throughout")
    return StateFit(deviations=float(worst.max()), words=words)


def _holding(words: str) -> str:
    return f"hold {words} what was recorded"


_NEGATIVE = _holding("the negative of")
_FACTOR_SAID = {_holding(words): factor for words, factor in FACTORS.items()}
_UNEXPLAINED = "differ, and nothing that was tried explains it"


def explain_numbers(recorded: Floats, live: Floats, scale: Floats, wrong: NDArray[np.intp]) -> str:
    """Return what the live numbers ``wrong`` are of recorded ones, those alike together.

    Args:
        recorded: (N, S).
        live: (N, S), at the same moments.
        scale: (S,): how far apart two values are that mean the same, about five times.
        wrong: Which numbers differ.
    """
    said: dict[str, list[int]] = {}
    for number in wrong.tolist():
        words = _number(recorded, live[:, number], scale, number)
        if words == _NEGATIVE and _are_exchanged(recorded, live, scale, number, wrong):
            # Two fingers that hold x and -x: both changes give the same numbers.
            words = f"{words}, or are exchanged with one another"
        said.setdefault(words, []).append(number)
    for number in said.pop(_UNEXPLAINED, []):
        # About zero, it does not tell a factor by itself, and may have that of another number.
        words = next(
            (
                one
                for one, factor in _FACTOR_SAID.items()
                if one in said
                and np.abs(live[:, number] - factor * recorded[:, number]).max()
                < _FITS_STATE * min(abs(factor), 1.0) * scale[number]
            ),
            _UNEXPLAINED,
        )
        said.setdefault(words, []).append(number)
    return "; ".join(said_of(sorted(numbers), words) for words, numbers in said.items())


def _are_exchanged(
    recorded: Floats, live: Floats, scale: Floats, number: int, wrong: NDArray[np.intp]
) -> bool:
    """Return whether a number and another of those in ``wrong`` hold each other's values."""

    def apart(mine: int, theirs: int) -> float:
        return float(np.abs(live[:, mine] - recorded[:, theirs]).max() / scale[mine])

    return any(
        max(apart(number, other), apart(other, number)) < _FITS_STATE
        for other in wrong.tolist()
        if other != number
    )


_SINGULAR = {"hold": "holds", "differ,": "differs,", "are": "is"}


def said_of(numbers: Sequence[int] | NDArray[np.intp], words: str) -> str:
    """Return a sentence of numbers; ``words`` begin with the verb, as of several."""
    if len(numbers) > 1:
        return f"numbers {listed(numbers)} {words}"
    verb, _, rest = words.partition(" ")
    return f"number {listed(numbers)} {_SINGULAR[verb]} {rest}"


def _number(recorded: Floats, live: Floats, scale: Floats, number: int) -> str:
    """Return what one live number (N,) is of the recorded states (N, S)."""

    def off(values: Floats, unit: float) -> float:
        return float(np.abs(live - values).max() / unit)

    for words, factor in FACTORS.items():
        unit = max(abs(factor), 1.0) * scale[number]
        # What is about zero is about the same in all units, and says nothing.
        told = np.abs((factor - 1) * recorded[:, number]).max() > _FITS_STATE * unit
        if told and off(factor * recorded[:, number], abs(factor) * scale[number]) < _FITS_STATE:
            return _holding(words)
    others = [
        (
            # Within this number's deviation: one that varies more fits a lot by chance.
            off(sign * recorded[:, j], min(scale[j], scale[number])),
            f"hold {'minus ' if sign < 0 else ''}recorded {j}",
        )
        for j, sign in product(range(recorded.shape[1]), (1, -1))
        if j != number
    ]
    best, words = min(others)
    return words if best < _FITS_STATE else _UNEXPLAINED


def listed(numbers: Sequence[int] | NDArray[np.intp]) -> str:
    """Return numbers for a sentence."""
    return ", ".join(str(int(one)) for one in numbers)
