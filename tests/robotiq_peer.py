"""A Robotiq 2F-85 at the end of a pseudo-terminal, on the Modbus server of pymodbus.

What its registers mean is written after Robotiq's instruction manual of the 2F-85; the protocol
is pymodbus's. Its fingers move by one step at every look at them, so no clock is involved.
"""

import asyncio
import os
import select
import threading
import tty

from pymodbus.server import ModbusSerialServer
from pymodbus.simulator import DataType, SimData, SimDevice

COMMAND, STATUS = 1000, 2000
OPEN_AT, CLOSED_AT = 3, 230
BAUD = 115200


class RobotiqPeer:
    """Serves until it is left; its attributes may be changed meanwhile."""

    def __init__(self, *, activated=True, object_at=None, step=40):
        self.activation = 3 if activated else 0
        self.object_at = object_at
        """Where the fingers meet something while they close, in the gripper's units."""

        self.step = step
        """How far they move at a look."""

        self.fault = 0
        self.commands = []
        """Every new (position, speed, force) it was told to go to."""

        self.silent = False
        """It answers nothing."""

        self._place, self._echo = OPEN_AT, 0
        self._action = 0x0100 if activated else 0
        self._looks = 0
        self._meets = 0

    def __enter__(self):
        # Client and server each open a device; two pairs are joined, as by a cable.
        pairs = [os.openpty(), os.openpty()]
        self._masters = [master for master, _ in pairs]
        self._slaves = [slave for _, slave in pairs]
        for descriptor in (*self._masters, *self._slaves):
            tty.setraw(descriptor)
        ours, self.port = (os.ttyname(slave) for slave in self._slaves)
        self._wake, self._end = os.pipe()
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._threads = [
            threading.Thread(target=self._copy, daemon=True),
            threading.Thread(target=self._serve, args=(ours, ready), daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._server.shutdown(), self._loop).result(10)
        os.close(self._end)
        for thread in self._threads:
            thread.join(10)
        for descriptor in (*self._masters, *self._slaves, self._wake):
            os.close(descriptor)

    def _copy(self):
        one, other = self._masters
        to = {one: other, other: one}
        while True:
            ready, _, _ = select.select([one, other, self._wake], [], [])
            if self._wake in ready:
                return
            for descriptor in ready:
                data = os.read(descriptor, 4096)
                if not self.silent:
                    os.write(to[descriptor], data)

    def _serve(self, port, ready):
        asyncio.set_event_loop(self._loop)
        blocks = [
            SimData(start, count=3, values=0, datatype=DataType.REGISTERS)
            for start in (COMMAND, STATUS)
        ]

        async def run():
            device = SimDevice(id=9, simdata=blocks, action=self._act)
            self._server = ModbusSerialServer(device, port=port, baudrate=BAUD)
            await self._server.serve_forever(background=True)
            ready.set()
            await self._server.serving

        self._loop.run_until_complete(run())
        self._loop.close()

    async def _act(self, _code, first, address, count, registers, written):
        if written is not None:
            commanded = registers[COMMAND - first : COMMAND - first + 3]
            commanded[address - COMMAND : address - COMMAND + count] = written
            self._command(*commanded)
        else:
            self._look()
            status = (
                (self._action >> 8) & 1 | (self._action >> 8) & 8
                | self.activation << 4 | self._meets << 6
            )  # fmt: skip
            at = STATUS - first
            registers[at : at + 3] = [
                status << 8,
                self.fault << 8 | self._echo,
                self._place << 8 | 10,
            ]

    def _command(self, action, place, strength):
        activates, goes = action & 0x0100, action & 0x0800
        if not activates:
            self.activation, self.fault = 0, 0
        elif not self._action & 0x0100:
            self.activation, self._looks = 1, 0
        told = (place & 255, strength >> 8, strength & 255)
        if activates and goes and self.activation == 3:
            self.commands.append(told)
            self._echo, self._meets = told[0], 0
        self._action = action

    def _look(self):
        self._looks += 1
        if self.activation == 1 and self._looks > 3:
            self.activation, self._place, self._echo = 3, OPEN_AT, 0
        if self.activation != 3 or not self._action & 0x0800 or self._meets:
            return
        goal = min(max(self._echo, OPEN_AT), CLOSED_AT)
        stop = goal
        if self.object_at is not None and goal > self._place:
            stop = min(goal, max(self.object_at, self._place))
        way = max(-self.step, min(self.step, stop - self._place))
        self._place += way
        if self._place == stop:
            self._meets = 3 if stop == goal else 2
