"""Devices that are not there, below the real libraries: HID, servos on a line, SDL's gamepads."""

import ctypes
import math
import os
import pty
import select
import socket
import struct
import threading
import tty
from pathlib import Path

import easyhid.easyhid

from dzrobot.envs.teleop.device import TeleopReading
from dzrobot.envs.teleop.handheld import SpaceMouseSource

SPACE_NAVIGATOR = (0x46D, 0xC626)
PATIENCE_S = 60.0
"""How long a busy machine may take."""


class EmulatedHidapi:
    """The functions of libhidapi that easyhid calls; its devices are sockets, a packet a report.

    Args:
        paths: Where they are.
    """

    def __init__(self, *paths):
        ffi = easyhid.easyhid.ffi
        self._kept = [ffi.new("char[]", str(path).encode()) for path in paths]
        self._memory = ffi.new("struct hid_device_info[]", len(paths))
        self._infos = self._memory + 0 if paths else ffi.NULL
        self._open = {}
        for number, path in enumerate(self._kept):
            info = self._memory[number]
            info.path, (info.vendor_id, info.product_id) = path, SPACE_NAVIGATOR
            info.next = self._memory + number + 1 if number + 1 < len(paths) else ffi.NULL

    def hid_enumerate(self, vendor, product):
        return self._infos

    def hid_free_enumeration(self, infos):
        pass

    def hid_open_path(self, path):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.connect(path.decode())
        self._open[peer.fileno()] = peer
        return peer.fileno()

    def hid_set_nonblocking(self, device, nonblocking):
        self._open[device].setblocking(not nonblocking)

    def hid_read(self, device, data, length):
        try:
            report = self._open[device].recv(length)
        except BlockingIOError:
            return 0
        easyhid.easyhid.ffi.memmove(data, report, len(report))
        # A device that was unplugged.
        return len(report) or -1

    def hid_close(self, device):
        self._open.pop(device).close()


class EmulatedSpaceMouse:
    """A SpaceNavigator: sends the reports that the real one sends.

    Args:
        path: Its device file.
    """

    def __init__(self, path):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._peer = None

    def plugged(self):
        self._listener.settimeout(PATIENCE_S)
        self._peer, _ = self._listener.accept()
        return self

    def push(self, x=0, y=0, z=0):
        """Raw counts of HID: right, towards the person, down; 350 is all the way."""
        self._peer.send(struct.pack("<Bhhh", 1, x, y, z))

    def turn(self, x=0, y=0, z=0):
        self._peer.send(struct.pack("<Bhhh", 2, x, y, z))

    def press(self, *buttons):
        """These are down, all others up."""
        self._peer.send(struct.pack("<BB", 3, sum(1 << button for button in buttons)))

    def unplug(self):
        self._peer.close()


class SourceOfEmulated(SpaceMouseSource):
    """The real source in a process whose libhidapi is emulated."""

    def open(self):
        path = Path(os.environ["EMULATED_HID"])
        easyhid.easyhid.hidapi = EmulatedHidapi(*([path] if path.exists() else []))
        super().open()
        # The first report is on its way: what the person does holds from the first step on.
        (peer,) = easyhid.easyhid.hidapi._open.values()
        select.select([peer], [], [], PATIENCE_S)


class OffScale:
    """A device, in its driver's process, that shows no number."""

    def __init__(self, config):
        pass

    def open(self):
        pass

    def poll(self):
        return TeleopReading(active=True, motion=(math.nan,) * 6)

    def close(self):
        pass


class EmulatedServos:
    """Servos of the X series on one line: a pseudo terminal that speaks protocol 2.0.

    Args:
        turns: What each shows, in steps of 1/4096 of a turn, by id; may be changed.
    """

    def __init__(self, turns):
        self.turns = turns
        self.is_silent = False
        self._line, ours = pty.openpty()
        tty.setraw(ours)
        self._ours = ours
        self.port = os.ttyname(ours)
        self._end, self._ending = os.pipe()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self):
        os.write(self._ending, b"x")
        self._thread.join(PATIENCE_S)
        for descriptor in (self._line, self._ours, self._end, self._ending):
            os.close(descriptor)

    def _run(self):
        heard = b""
        while self._end not in select.select([self._line, self._end], [], [])[0]:
            heard += os.read(self._line, 1024)
            while (start := heard.find(b"\xff\xff\xfd\x00")) >= 0 and len(heard) >= start + 7:
                (length,) = struct.unpack_from("<H", heard, start + 5)
                end = start + 7 + length
                if len(heard) < end:
                    break
                packet, heard = heard[start:end], heard[end:]
                if packet[-2:] == checksum(packet[:-2]) and not self.is_silent:
                    os.write(self._line, self._answer(packet[4], packet[7], packet[8:-2]))

    def _answer(self, number, instruction, given):
        if instruction == 0x01 and number in self.turns:
            return status(number, struct.pack("<HB", 1190, 52))
        if instruction == 0x82:
            assert struct.unpack_from("<HH", given) == (132, 4), "the present position"
            return b"".join(
                status(one, struct.pack("<i", self.turns[one]))
                for one in given[4:] if one in self.turns
            )  # fmt: skip
        return b""


def status(number, parameters):
    """Return the packet in which a servo answers."""
    stuffed = parameters.replace(b"\xff\xff\xfd", b"\xff\xff\xfd\xfd")
    length = struct.pack("<H", len(stuffed) + 4)
    packet = b"\xff\xff\xfd\x00" + bytes([number]) + length + b"\x55\x00" + stuffed
    return packet + checksum(packet)


def checksum(packet):
    """Return the CRC-16 of the maker's data sheet: polynomial 0x8005, begun with 0."""
    crc = 0
    for byte in packet:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x8005 if crc & 0x8000 else crc << 1) & 0xFFFF
    return struct.pack("<H", crc)


class EmulatedGamepad:
    """A virtual gamepad of SDL itself, in this process; pygame has to be initialized."""

    def __init__(self):
        loaded = Path("/proc/self/maps").read_text().split()
        self._sdl = ctypes.CDLL(next(word for word in loaded if "libSDL2-2" in word))
        self._sdl.SDL_JoystickOpen.restype = ctypes.c_void_p
        gamecontroller, axes, buttons, hats = 1, 6, 15, 0
        self._number = self._sdl.SDL_JoystickAttachVirtual(gamecontroller, axes, buttons, hats)
        self._pad = ctypes.c_void_p(self._sdl.SDL_JoystickOpen(self._number))

    def axis(self, number, value):
        self._sdl.SDL_JoystickSetVirtualAxis(self._pad, number, ctypes.c_int16(value))

    def button(self, number, down):
        self._sdl.SDL_JoystickSetVirtualButton(self._pad, number, ctypes.c_uint8(down))
        # Else SDL would see the last state alone, where a real pad sends every change.
        self._sdl.SDL_JoystickUpdate()

    def unplug(self):
        self._sdl.SDL_JoystickDetachVirtual(self._number)
