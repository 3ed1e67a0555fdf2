"""No wrong picture reaches a batch: sets whose pictures say which they are, changed in many ways.

A picture holds its frame, episode and camera as a bit code. A set is changed, opened, and every
picture of every window read: it is the right one, or the episode is reported and left out.
"""

import itertools
import json
import multiprocessing
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_worlds import HEIGHT, ROBOT, WIDTH

from dzrobot.errors import DatasetError
from dzrobot.recording import EpisodeWriter, consolidate
from dzrobot.training.data import DatasetReader, ReaderOptions
from dzrobot.training.data.films import FrameTable, _from_header, _from_packets
from dzrobot.training.data.reading_pool import ReadingPool, decode_all
from dzrobot.training.data.video_decoding import PyAvDecoder

LENGTHS = (24, 27, 30, 27)
CAMERAS = ("observation.images.image", "observation.images.wrist_image")
HZ = ROBOT.timing.control_hz
BLOCK = 8
"""Pixels of a side of one bit: 6 x 8 bits in a picture."""


def picture(episode, frame, camera):
    """Return the picture (48, 64, 3) uint8 that says what it is."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    image = np.stack([x + 64 * camera, 40 + 55 * episode + 0 * y, 90 + y], -1).astype(np.uint8)
    for bit in range(8):
        here = slice(bit * BLOCK, (bit + 1) * BLOCK)
        image[:BLOCK, here] = 235 if frame >> bit & 1 else 16
        image[BLOCK : 2 * BLOCK, here] = 235 if (episode << 1 | camera) >> bit & 1 else 16
    return image


def read_code(image):
    """Return episode, frame and camera that a picture says it is."""
    cells = image[: 2 * BLOCK].reshape(2, BLOCK, 8, BLOCK, 3)[:, 2:6, :, 2:6].mean((1, 3, 4)) > 128
    frame, rest = (cells * (1 << np.arange(8))).sum(1).tolist()
    return rest >> 1, frame, rest & 1


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Return a set of v2.1, one of v3.0 and one of v3.0 with all episodes in one file."""
    folder = tmp_path_factory.mktemp("bases")
    for name, version in (("two", "v2.1"), ("three", "v3.0"), ("packed", "v3.0")):
        with EpisodeWriter(folder / name, ROBOT, fps=HZ, version=version, video=True) as writer:
            for episode, length in enumerate(LENGTHS):
                for row in range(length):
                    views = {
                        key: picture(episode, row, i) for i, key in enumerate(ROBOT.video_keys)
                    }
                    cut = np.cumsum([part.dim for part in ROBOT.state])
                    parts = np.split(numbers_of(episode, row), cut)
                    state = dict(zip([part.key for part in ROBOT.state], parts, strict=False))
                    action = {
                        part.key: np.full(part.dim, np.sin(row / 5), np.float32)
                        for part in ROBOT.action
                    }
                    text = {ROBOT.language: f"task {episode % 2}"}
                    writer.add_frame({**views, **state, **text}, action)
                writer.save_episode()
    consolidate(folder / "packed")
    return folder


@dataclass
class Found:
    """What was read of a set."""

    used: list[int]
    wrong: list[str]
    reported: list[str]
    unread: int


def read_all(path, cache, decoder="pyav", deep=False):
    """Read every picture of every episode that has a window."""
    options = ReaderOptions(cache=cache, damaged="count", empty="count", decoder=decoder)
    try:
        reader = DatasetReader(path, ROBOT, options)
    except DatasetError as error:
        return Found([], [], [str(error)], 0)
    found = Found([], [], reader.faults(), 0)
    if deep:
        with ReadingPool([reader], 1) as pool:
            found.reported += [fault for one in decode_all(pool) for fault in one.faults]
    for ordinal in np.unique(reader.windows.episode).tolist():
        found.used.append(int(reader.catalog.episodes.index[ordinal]))
        # Which row it is, the row's own numbers say.
        states = np.concatenate([reader.states(ordinal)[part.key] for part in ROBOT.state], 1)
        rows = [ROWS[state.tobytes()] for state in states]
        for camera, source in enumerate(reader.resolution.views.values()):
            for row, image in pictures_of(reader, ordinal, source, len(rows), found):
                if read_code(image) != (*rows[row], camera):
                    found.wrong.append(f"row {rows[row]} shows {read_code(image)}")
    return found


def pictures_of(reader, ordinal, source, rows, found):
    """Yield the pictures that can be read, all at once where they all can."""
    try:
        yield from enumerate(reader.frames(ordinal, source, range(rows)))
        return
    except DatasetError:
        pass
    for row in range(rows):
        try:
            yield row, reader.frames(ordinal, source, [row])[0]
        except DatasetError as error:
            found.unread += 1
            found.reported.append(str(error))


def numbers_of(episode, row):
    """Return the state of a row, which no other row has."""
    return np.random.default_rng([episode, row]).normal(size=WIDE).astype(np.float32)


WIDE = sum(part.dim for part in ROBOT.state)
ROWS = {numbers_of(e, r).tobytes(): (e, r) for e in range(4) for r in range(LENGTHS[e])}


def film(path, pictures, codec="libx264", **options):
    """Write a video.

    SVT-AV1 and x265 start threads with real-time priority whatever they are told, and one of them
    has crashed a process of the whole suite once in encoding: they run in a process of their own,
    and once more where it died by a signal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if codec not in ("libsvtav1", "libx265"):
        write_film(path, pictures, codec, **options)
        return
    for _ in range(3):
        writer = FORK.Process(target=write_film, args=(path, pictures, codec), kwargs=options)
        writer.start()
        writer.join()
        if writer.exitcode >= 0:
            break
    assert writer.exitcode == 0, f"{codec} ended with {writer.exitcode}"


FORK = multiprocessing.get_context("fork")


def write_film(path, pictures, codec, pixels="yuv420p", rate=None, **options):
    quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=int(rate or HZ))
        stream.height, stream.width, stream.pix_fmt = *pictures[0].shape[:2], pixels
        stream.options = {**quiet, **options}
        stream.codec_context.thread_count = 1
        for image in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


CODECS = (
    {"g": "10", "bf": "0"},
    {"g": "12", "bf": "3"},
    {"g": "250"},
    {"codec": "libx265"},
    {"codec": "libsvtav1", "preset": "12"},
    {"codec": "mpeg4", "qscale": "2", "b": "4000000"},
    {"pixels": "yuv444p", "crf": "12"},
)


class Set:
    """A copy of a base that is being changed."""

    def __init__(self, base, path, rng):
        shutil.copytree(base, path)
        self.path, self.rng = path, rng
        self.info = json.loads((path / "meta/info.json").read_text())
        self.three = self.info["codebase_version"] == "v3.0"

    @property
    def list_file(self):
        return next((self.path / "meta/episodes").glob("*/*.parquet"))

    def rows(self):
        return pq.read_table(self.list_file).to_pylist()

    def write_rows(self, rows):
        schema = pq.read_schema(self.list_file)
        pq.write_table(pa.Table.from_pylist(rows, schema), self.list_file)

    def lines(self, name, change):
        path = self.path / "meta" / name
        lines = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def save_info(self, **changes):
        self.info |= changes
        (self.path / "meta/info.json").write_text(json.dumps(self.info))

    def video(self, episode, camera=0):
        place = {"episode_chunk": 0, "episode_index": episode, "video_key": CAMERAS[camera]}
        if self.three:
            row = next(row for row in self.rows() if row["episode_index"] == episode)
            place |= {
                name: row[f"videos/{CAMERAS[camera]}/{name}"]
                for name in ("chunk_index", "file_index")
            }
        return self.path / self.info["video_path"].format(**place)

    def data_files(self):
        return sorted((self.path / "data").rglob("*.parquet"))

    def times(self, change, camera=0):
        """Change the list of times at which episodes begin in their film."""
        rows = self.rows()
        for end in ("from", "to"):
            name = f"videos/{CAMERAS[camera]}/{end}_timestamp"
            for row, time in zip(rows, change([row[name] for row in rows]), strict=True):
                row[name] = max(0.0, time)
        self.write_rows(rows)

    def pick(self, *values):
        return values[int(self.rng.integers(len(values)))]


def clips(camera, episodes=range(4)):
    return [picture(e, i, camera) for e in episodes for i in range(LENGTHS[e])]


# What leaves a set that must be read whole. ------------------------------------------------------


def other_order_of_lists(s):
    order = s.rng.permutation(4)
    if s.three:
        rows = s.rows()
        s.write_rows([rows[at] for at in order])
    else:
        s.lines("episodes.jsonl", lambda lines: [lines[at] for at in order])


def other_names(s):
    if s.three:
        key, new = (
            "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
            int(s.rng.integers(20, 90)),
        )
        moved, rows = {}, s.rows()
        for row in rows:
            for camera in CAMERAS:
                name = f"videos/{camera}/file_index"
                old = key.format(video_key=camera, chunk_index=0, file_index=row[name])
                target = key.format(video_key=camera, chunk_index=0, file_index=row[name] + new)
                moved[old] = target
                row[name] += new
        for old, target in moved.items():
            (s.path / old).rename(s.path / target)
        s.write_rows(rows)
        return
    for camera, e in itertools.product(CAMERAS, range(4)):
        old = s.path / f"videos/chunk-000/{camera}/episode_{e:06d}.mp4"
        target = s.path / f"videos/{camera}/part-{e:04d}.mp4"
        target.parent.mkdir(parents=True, exist_ok=True)
        old.rename(target)
    s.save_info(video_path="videos/{video_key}/part-{episode_index:04d}.mp4")


def other_codec(s):
    chosen = s.pick(*CODECS)
    for camera in range(2):
        for path in {s.video(e, camera) for e in range(4)}:
            inside = [e for e in range(4) if s.video(e, camera) == path]
            film(path, clips(camera, inside), **chosen)


def other_packing(s):
    """Films of one, two or three episodes each, in their order."""
    if not s.three:
        return other_codec(s)
    cut = sorted(s.rng.choice(range(1, 4), size=int(s.rng.integers(1, 3)), replace=False).tolist())
    groups = np.split(np.arange(4), cut)
    return repack(s, groups)


def other_order_in_the_film(s):
    if not s.three:
        return other_order_of_lists(s)
    return repack(s, [s.rng.permutation(4)])


def repack(s, groups):
    rows = {row["episode_index"]: row for row in s.rows()}
    for camera, key in enumerate(CAMERAS):
        for number, group in enumerate(groups, start=40):
            path = s.path / f"videos/{key}/chunk-000/file-{number:03d}.mp4"
            film(path, clips(camera, group), g="10", bf="0")
            begun = 0
            for e in group.tolist():
                rows[e][f"videos/{key}/chunk_index"] = 0
                rows[e][f"videos/{key}/file_index"] = number
                rows[e][f"videos/{key}/from_timestamp"] = begun / HZ
                rows[e][f"videos/{key}/to_timestamp"] = (begun + LENGTHS[e]) / HZ
                begun += LENGTHS[e]
    s.write_rows([rows[e] for e in range(4)])


def drifting_times(s):
    if not s.three:
        return other_codec(s)
    late = float(s.rng.uniform(-0.3, 0.3)) / HZ
    return s.times(lambda times: [time + at * late for at, time in enumerate(times)])


def other_parquet(s):
    for path in s.data_files():
        table = pq.read_table(path)
        kind = s.pick("groups", "zstd", "double", "more")
        if kind == "double":
            at = table.column_names.index("action")
            wide = table["action"].cast(pa.list_(pa.float64()))
            table = table.set_column(at, pa.field("action", wide.type), wide)
        if kind == "more":
            table = table.append_column("note", pa.array(["x"] * len(table)))
        pq.write_table(
            table, path, row_group_size=int(s.rng.integers(3, 40)),
            compression="zstd" if kind == "zstd" else "snappy",
        )  # fmt: skip


def other_system(s):
    """Line ends, byte-order marks, and files that macOS leaves."""
    info = s.path / "meta/info.json"
    info.write_bytes(b"\xef\xbb\xbf" + info.read_bytes())
    for path in (s.path / "meta").glob("*.jsonl"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    for path in [*s.path.rglob("*.parquet"), *s.path.rglob("*.mp4")]:
        (path.parent / f"._{path.name}").write_bytes(b"\0\5\x16\7Mac OS X" + bytes(50))


def gaps_in_tasks(s):
    new = int(s.rng.integers(2, 50))
    if s.three:
        path = s.path / "meta/tasks.parquet"
        table = pq.read_table(path)
        at = table.column_names.index("task_index")
        table = table.set_column(at, "task_index", pa.array([0, new], pa.int64()))
        pq.write_table(table.append_column("category", pa.array(["a", "b"])), path)
    else:
        s.lines("tasks.jsonl", lambda lines: [lines[0], {**lines[1], "task_index": new}])
    for path in s.data_files():
        table = pq.read_table(path)
        at = table.column_names.index("task_index")
        numbers = [new if value else 0 for value in table["task_index"].to_pylist()]
        pq.write_table(table.set_column(at, "task_index", pa.array(numbers, pa.int64())), path)


def subset(s):
    """One episode is taken out of the lists; its pictures and rows stay."""
    out = int(s.rng.integers(4))
    if s.three:
        s.write_rows([row for row in s.rows() if row["episode_index"] != out])
    else:
        s.lines("episodes.jsonl", lambda lines: [x for x in lines if x["episode_index"] != out])
    s.save_info(total_episodes=3)


READABLE = (
    other_order_of_lists, other_names, other_codec, other_packing, other_order_in_the_film,
    drifting_times, other_parquet, other_system, gaps_in_tasks, subset,
)  # fmt: skip


# What looks consistent, and would train on pictures of another row. ------------------------------


def shifted(s):
    """One episode, or all from one on, are said to begin some frames early or late."""
    first, by = int(s.rng.integers(4)), int(s.rng.integers(1, 9)) * s.pick(-1, 1) / HZ
    last = s.pick(first, 3)
    if not s.three:
        return short_film(s)
    camera = s.pick(0, 1)
    return s.times(
        lambda times: [t + by if first <= at <= last else t for at, t in enumerate(times)], camera
    )


def shared(s):
    """Two episodes are given one stretch, or one file."""
    one, two = s.rng.permutation(4)[:2].tolist()
    if s.three:
        camera, rows = s.pick(0, 1), s.rows()
        for name in ("from_timestamp", "to_timestamp", "file_index"):
            rows[two][f"videos/{CAMERAS[camera]}/{name}"] = rows[one][
                f"videos/{CAMERAS[camera]}/{name}"
            ]
        return s.write_rows(rows)
    return shutil.copy(s.video(one), s.video(two))


def swapped(s):
    one, two = s.pick((0, 1), (1, 2), (2, 3), (0, 3), (0, 2))
    if s.three:
        camera, rows = s.pick(0, 1), s.rows()
        for name in ("from_timestamp", "to_timestamp", "file_index"):
            key = f"videos/{CAMERAS[camera]}/{name}"
            rows[one][key], rows[two][key] = rows[two][key], rows[one][key]
        return s.write_rows(rows)
    aside = s.path / "aside.mp4"
    s.video(one).rename(aside)
    s.video(two).rename(s.video(one))
    return aside.rename(s.video(two))


def swapped_in_the_film(s):
    """Two episodes lie in each other's order in the film, and the times still fit the rows."""
    if not s.three:
        return swapped(s)
    one, two = s.pick((0, 1), (1, 2), (2, 3), (1, 3))
    order = [two if e == one else one if e == two else e for e in range(4)]
    path = s.path / f"videos/{CAMERAS[0]}/chunk-000/file-050.mp4"
    film(path, clips(0, range(4)), g="10", bf="0")
    rows, begun = s.rows(), 0
    for e in order:
        rows[e][f"videos/{CAMERAS[0]}/file_index"] = 50
        rows[e][f"videos/{CAMERAS[0]}/from_timestamp"] = begun / HZ
        rows[e][f"videos/{CAMERAS[0]}/to_timestamp"] = (begun + LENGTHS[e]) / HZ
        begun += LENGTHS[e]
    return s.write_rows(rows)


def short_film(s):
    """A writer lost pictures, or wrote some twice; times follow the rows, or the film."""
    episode, camera = int(s.rng.integers(4)), s.pick(0, 1)
    path = s.video(episode, camera)
    inside = [e for e in range(4) if s.video(e, camera) == path]
    lost, at = int(s.rng.integers(1, 4)) * s.pick(-1, 1), int(s.rng.integers(2, 20))
    pictures, starts = [], []
    for e in inside:
        clip = clips(camera, [e])
        if e == episode:
            clip = clip[:at] + clip[at + lost :]
        starts.append(len(pictures))
        pictures += clip
    film(path, pictures, g="10", bf="0")
    if s.three and s.pick(True, False):
        rows = s.rows()
        for e, start in zip(inside, starts, strict=True):
            rows[e][f"videos/{CAMERAS[camera]}/from_timestamp"] = start / HZ
        s.write_rows(rows)


def rows_out_of_step(s):
    """Rows of an episode are lost or in another order, and their own numbers with them."""
    path = s.data_files()[0]
    table = pq.read_table(path)
    episode = int(table["episode_index"][0].as_py())
    mine = table.filter(pa.array(table["episode_index"].to_numpy() == episode))
    rest = table.filter(pa.array(table["episode_index"].to_numpy() != episode))
    order = np.arange(len(mine))
    if s.pick(True, False):
        order[3], order[9] = 9, 3
    else:
        order = np.roll(order, int(s.rng.integers(1, 5)))
    pq.write_table(pa.concat_tables([mine.take(pa.array(order)), rest]), path)


LIES = (shifted, shared, swapped, swapped_in_the_film, short_film, rows_out_of_step)


# What is broken. ---------------------------------------------------------------------------------


def cut_short(s):
    path = s.pick(*s.data_files(), *sorted(s.path.rglob("*.mp4")))
    path.write_bytes(path.read_bytes()[: -int(s.rng.integers(50, 900))])


def pointer(s):
    path = s.pick(*s.data_files(), *sorted(s.path.rglob("*.mp4")))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")


def overwritten(s):
    """Bytes inside a film are others."""
    path = s.pick(*sorted(s.path.rglob("*.mp4")))
    content = bytearray(path.read_bytes())
    start = content.index(b"mdat") + 200
    at = int(s.rng.integers(start, max(start + 1, len(content) // 2)))
    content[at : at + 300] = s.rng.integers(0, 256, 300, dtype=np.uint8).tobytes()
    path.write_bytes(bytes(content))


BROKEN = (cut_short, pointer, overwritten)
EVERY: list[tuple[str, Callable]] = [
    (name, change) for change in READABLE + LIES + BROKEN for name in ("two", "three", "packed")
]
COUNT = 418
SAMPLE = 22


def mutate(bases, folder, number):
    """Return the ``number``-th changed set, and what it was changed by."""
    name, change = EVERY[number % len(EVERY)]
    changed = Set(bases / name, folder / f"{number}", np.random.default_rng(number))
    change(changed)
    return changed.path, change


def check_mutations(bases, folder, numbers):
    counts = dict.fromkeys(("readable", "lies", "broken", "refused though readable"), 0)
    for number in numbers:
        path, change = mutate(bases, folder, number)
        found = read_all(path, folder / "cache")
        where = f"{number}: {change.__name__} of {EVERY[number % len(EVERY)][0]}"
        assert not found.wrong, f"{where}: {found.wrong[:3]}"
        whole = len(found.used) == (3 if change is subset else 4) and not found.unread
        if change in READABLE:
            counts["readable"] += 1
            counts["refused though readable"] += not whole
            assert whole, f"{where}: {found.reported}"
        elif change in LIES:
            counts["lies"] += 1
            assert whole or found.reported, f"{where}: not reported"
        else:
            counts["broken"] += 1
            # A decoder does not notice all damage inside a picture; it is the right one still.
            assert found.reported or (whole and change is overwritten), f"{where}: not reported"
        shutil.rmtree(path)
    return counts


def test_changed_sets_are_read_rightly_or_reported(bases, tmp_path):
    numbers = np.random.default_rng(0).choice(COUNT, SAMPLE, replace=False).tolist()
    assert check_mutations(bases, tmp_path, numbers)["readable"]


@pytest.mark.long
def test_every_changed_set_is_read_rightly_or_reported(bases, tmp_path):
    counts = check_mutations(bases, tmp_path, range(COUNT))
    assert counts["readable"] >= 150
    assert counts["lies"] >= 100


def test_tables_from_headers_are_those_of_the_packets(tmp_path):
    """FFmpeg goes through the packets; what is read from the header is the same."""
    for number, options in enumerate(CODECS):
        path = tmp_path / f"{number}.mp4"
        film(path, clips(0, [1]), **options)
        found, packets = _from_header(path), _from_packets(path)
        assert found is not None
        header, _ = found
        for name in ("pts", "key_frames", "key_pts", "key_dts"):
            np.testing.assert_array_equal(getattr(header, name), getattr(packets, name), name)
        assert header.seconds_per_tick == pytest.approx(packets.seconds_per_tick)


def turned(path):
    """Let the display matrix of a film say that it is to be turned by 90 degrees."""
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd")
    size = int.from_bytes(content[at - 4 : at], "big")
    matrix = np.array([0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30], ">i4").tobytes()
    content[at - 4 + size - 44 : at - 4 + size - 8] = matrix
    path.write_bytes(bytes(content))


def counting_packets(path, source):
    """Give the packets of a film with B frames times in the order in which they are decoded."""
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        video = old.streams.video[0]
        stream = new.add_stream_from_template(video)
        step = round(1 / HZ / video.time_base)
        packets = [packet for packet in old.demux(video) if packet.dts is not None]
        for number, packet in enumerate(packets):
            packet.pts = packet.dts = number * step
            packet.stream = stream
            new.mux(packet)


def test_films_are_shown_as_players_show_them(tmp_path):
    plain, path = tmp_path / "plain.mp4", tmp_path / "film.mp4"
    film(plain, clips(0, [2]), g="12", bf="3")
    shown = PyAvDecoder(plain, FrameTable.of(plain)).frames(range(30))
    counting_packets(path, plain)
    table = FrameTable.of(path)
    assert table.counted
    numbers = [29, 0, 14, 15, 3]
    np.testing.assert_array_equal(PyAvDecoder(path, table).frames(numbers), shown[numbers])
    turned(plain)
    table = FrameTable.of(plain)
    assert (table.turns, table.size) == (3, (WIDTH, HEIGHT))
    upright = PyAvDecoder(plain, table).frames(numbers)
    np.testing.assert_array_equal(upright, np.rot90(shown[numbers], 3, (1, 2)))


def with_a_gap(path):
    """Show the second half of a film one second later."""
    source = path.with_name("source.mp4")
    path.rename(source)
    with av.open(str(source)) as old, av.open(str(path), "w") as new:
        video = old.streams.video[0]
        stream = new.add_stream_from_template(video)
        packets = [packet for packet in old.demux(video) if packet.dts is not None]
        for number, packet in enumerate(packets):
            if 2 * number >= len(packets):
                packet.pts += round(1 / video.time_base)
                packet.dts += round(1 / video.time_base)
            packet.stream = stream
            new.mux(packet)
    source.unlink()


@pytest.mark.parametrize("change", ["rate", "gap"])
def test_pictures_shown_at_other_times_than_their_rows_are_named(bases, tmp_path, change):
    copy = Set(bases / "two", tmp_path / "set", np.random.default_rng(0))
    path = copy.video(1)
    film(path, clips(0, [1]), bf="0", rate=2 * HZ if change == "rate" else HZ)
    if change == "gap":
        with_a_gap(path)
    found = read_all(copy.path, tmp_path / "cache")
    assert found.used == [0, 2, 3]
    assert not found.wrong
    assert f"off the grid of {HZ:g} frames per second" in "".join(found.reported)


@pytest.mark.parametrize("left", [0, 1, 100, 0.5, 0.99])
def test_a_kept_table_that_is_cut_short_is_made_anew(tmp_path, left):
    plain, path, cache = tmp_path / "plain.mp4", tmp_path / "film.mp4", tmp_path / "cache"
    film(plain, clips(0, [2]), g="12", bf="3")
    counting_packets(path, plain)
    made = FrameTable.of(path, cache)
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: left if isinstance(left, int) else int(left * len(whole))])
    found = FrameTable.of(path, cache)
    np.testing.assert_array_equal(found.pts, made.pts)
    assert file.read_bytes() == whole
    kept = FrameTable.of(path, cache)
    np.testing.assert_array_equal(kept.pts, made.pts)
    assert (kept.size, kept.counted) == (made.size, made.counted)


def test_every_picture_can_be_decoded(bases, tmp_path):
    """What lists and headers do not show: films of one length exchanged, damage inside."""
    path = tmp_path / "set"
    shutil.copytree(bases / "two", path)
    folder = path / "videos/chunk-000" / CAMERAS[0]
    one, three = folder / "episode_000001.mp4", folder / "episode_000003.mp4"
    aside = one.rename(folder / "aside.mp4")
    three.rename(one)
    aside.rename(three)
    film = bytearray((folder / "episode_000002.mp4").read_bytes())
    at = film.index(b"mdat") + len(film) // 3
    film[at : at + 500] = bytes(500)
    (folder / "episode_000002.mp4").write_bytes(bytes(film))
    found = read_all(path, tmp_path / "cache", deep=True)
    said = "\n".join(found.reported)
    for episode in (1, 3):
        assert f"episode {episode}: video.image: its mean colors are" in said
    assert "episode 2: video.image: frame" in said
    assert found.unread
