"""Atari 2600 games with the usual preprocessing, straight on the Arcade Learning Environment.

Mnih et al., "Human-level control through deep reinforcement learning" (2015): an action is
repeated for four frames, the last two are pooled by their maximum, made grey, shrunk to 84 x 84,
and the last four such images are what an agent sees. Machado et al., "Revisiting the Arcade
Learning Environment" (2018): sticky actions, and a limit of 108 000 frames (30 minutes).
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import dm_env
import numpy as np
from dm_env import specs

from seedlib.environments import errors
from seedlib.environments import options as options_lib

_STICKINESS = 0.25  # Probability that a frame repeats the previous frame's action.
_SIZE = 84  # Pixels, height and width.
_NOOP = 0  # The same action in every game's set.

# fmt: off
GAMES = (
    "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone",
    "BeamRider", "Berzerk", "Bowling", "Boxing", "Breakout", "Centipede", "ChopperCommand",
    "CrazyClimber", "Defender", "DemonAttack", "DoubleDunk", "Enduro", "FishingDerby", "Freeway",
    "Frostbite", "Gopher", "Gravitar", "Hero", "IceHockey", "Jamesbond", "Kangaroo", "Krull",
    "KungFuMaster", "MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong",
    "PrivateEye", "Qbert", "Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris",
    "SpaceInvaders", "StarGunner", "Surround", "Tennis", "TimePilot", "Tutankham", "UpNDown",
    "Venture", "VideoPinball", "WizardOfWor", "YarsRevenge", "Zaxxon",
)
"""The 57 games that agents are compared on."""
# fmt: on


@dataclasses.dataclass(frozen=True)
class AtariSettings:
    """How a game is played and shown.

    Attributes:
      sticky_actions: whether each frame repeats the previous frame's action with probability 0.25.
      full_action_set: all 18 actions instead of those that do something in the game.
      noop_max: an episode begins with a random 1 to `noop_max` frames without action; 0 for none.
        They do not count as frames.
      frame_skip: frames that an action is repeated for. The image is the maximum of the last two
        of them (with 1, it is the one frame).
      stack: images in an observation, the newest last. At the start of an episode all of them are
        its first image.
      max_frames: frames after which an episode is truncated. A step is never cut short: a limit
        that is no multiple of `frame_skip` is as good as the next multiple (18 is 20 with 4).
      terminal_on_life_loss: whether an episode also ends, with discount 0, where a life is lost.
        The next one goes on from there, and `max_frames` counts from the start of the game.
    """

    sticky_actions: bool = False
    full_action_set: bool = False
    noop_max: int = 30
    frame_skip: int = 4
    stack: int = 4
    max_frames: int = 108_000
    terminal_on_life_loss: bool = False

    def __post_init__(self) -> None:
        """Refuses values that cannot be.

        Raises:
          EnvironmentLoadError: naming the field and its value.
        """
        options_lib.boolean(
            sticky_actions=self.sticky_actions,
            full_action_set=self.full_action_set,
            terminal_on_life_loss=self.terminal_on_life_loss,
        )
        options_lib.at_least(0, noop_max=self.noop_max)
        options_lib.at_least(
            1, frame_skip=self.frame_skip, stack=self.stack, max_frames=self.max_frames
        )


class Atari(dm_env.Environment):
    """One game. Observations are uint8 `[84, 84, stack]`, a new array each step.

    Rewards are changes of the game's score, summed over the frames of a step and not clipped. The
    end of a game is a LAST step of discount 0, the frame limit one of discount 1.
    """

    def __init__(self, game: str, seed: int, settings: AtariSettings | None = None) -> None:
        """Loads the game.

        Args:
          game: for example `Pong` or `MontezumaRevenge`.
          seed: of the frames without action and of sticky actions.
          settings: how it is played and shown.

        Raises:
          EnvironmentLoadError: where there is no such game, or a package is missing.
        """
        try:
            # Here and not at the top: an actor that plays no Atari needs neither.
            import ale_py
            import cv2
            from ale_py import roms
        except ImportError as error:
            raise _missing(game, error) from error
        self._settings = settings = settings or AtariSettings()
        seeds = np.random.SeedSequence(seed)
        self._random = np.random.default_rng(seeds.spawn(1)[0])
        self._cv2 = cv2
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale = ale = ale_py.ALEInterface()
        # The emulator reads these when a game is loaded. Its seed is a signed 32-bit number.
        ale.setInt("random_seed", int(seeds.generate_state(1)[0] >> 1))
        ale.setFloat("repeat_action_probability", _STICKINESS if settings.sticky_actions else 0.0)
        ale.loadROM(str(roms.get_rom_path(_rom(game))))
        actions = ale.getLegalActionSet() if settings.full_action_set else ale.getMinimalActionSet()
        self._actions = [action.value for action in actions]
        # The raw frames [height, width] that are pooled.
        self._screen = np.empty(ale.getScreenDims(), np.uint8)
        self._previous_screen = np.empty_like(self._screen)
        self._images: list[np.ndarray] = []  # The last `stack`, oldest first.
        self._frames = 0  # Since the game began.
        self._lives = 0
        self._needs_reset = True
        self._game_goes_on = False  # Whether only a life was lost.

    def reset(self) -> dm_env.TimeStep:
        """Begins an episode: a new game, unless the last episode ended with a life only."""
        ale = self._ale
        if not (self._needs_reset and self._game_goes_on):
            ale.reset_game()
            noop_max = self._settings.noop_max
            for _ in range(self._random.integers(1, noop_max + 1) if noop_max else 0):
                ale.act(_NOOP)
                if ale.game_over():
                    ale.reset_game()
            self._frames = 0
        self._lives = ale.lives()
        ale.getScreenGrayscale(self._screen)
        self._images = [self._shrunk()] * self._settings.stack
        self._needs_reset = False
        self._game_goes_on = False
        return dm_env.restart(self._stacked())

    def step(self, action: Any) -> dm_env.TimeStep:
        """Repeats an action, or begins an episode where the last one is over."""
        if self._needs_reset:
            return self.reset()
        ale, settings = self._ale, self._settings
        emulate, game_over = ale.act, ale.game_over
        value = self._actions[int(action)]
        last = settings.frame_skip - 1
        reward = 0
        terminated = False
        pooled = False
        for frame in range(settings.frame_skip):
            reward += emulate(value)
            self._frames += 1
            if game_over():
                terminated = True
            elif settings.terminal_on_life_loss and ale.lives() < self._lives:
                terminated = self._game_goes_on = True
            if frame == last:
                pooled = last > 0
            elif terminated:  # An episode's end within a step shows its very last frame alone.
                break
            elif frame == last - 1:
                ale.getScreenGrayscale(self._previous_screen)
        self._lives = ale.lives()
        ale.getScreenGrayscale(self._screen)
        if pooled:
            np.maximum(self._screen, self._previous_screen, out=self._screen)
        self._images = [*self._images[1:], self._shrunk()]
        truncated = self._frames >= settings.max_frames
        if truncated:
            self._game_goes_on = False
        if terminated or truncated:
            self._needs_reset = True
            return dm_env.TimeStep(
                dm_env.StepType.LAST,
                float(reward),
                0.0 if terminated else 1.0,
                self._stacked(),
            )
        return dm_env.TimeStep(dm_env.StepType.MID, float(reward), 1.0, self._stacked())

    def observation_spec(self) -> specs.BoundedArray:
        """The last images, uint8 `[84, 84, stack]`."""
        return specs.BoundedArray(
            (_SIZE, _SIZE, self._settings.stack), np.uint8, 0, 255, name="observation"
        )

    def action_spec(self) -> specs.DiscreteArray:
        """An index into the game's action set."""
        return specs.DiscreteArray(len(self._actions), name="action")

    def _shrunk(self) -> np.ndarray:
        """Returns a new image [84, 84] of the screen."""
        cv2 = self._cv2
        return cv2.resize(self._screen, (_SIZE, _SIZE), interpolation=cv2.INTER_AREA)

    def _stacked(self) -> np.ndarray:
        """Returns the images as one new array [84, 84, stack]."""
        if len(self._images) == 1:
            return self._images[0][..., np.newaxis]
        # Ten times as fast as `numpy.stack` along the last axis.
        return self._cv2.merge(self._images)


def check(argument: str, options: Mapping[str, Any]) -> None:
    """Refuses a game or an option that cannot be.

    Raises:
      EnvironmentLoadError: naming it, and what is possible.
    """
    _rom(argument)
    options_lib.settings(AtariSettings, "atari", options)


def make(argument: str, seed: int, options: Mapping[str, Any]) -> Atari:
    """Returns the game `argument`; options are the fields of `AtariSettings`."""
    return Atari(argument, seed, options_lib.settings(AtariSettings, "atari", options))


def action_repeat(argument: str, options: Mapping[str, Any]) -> int:
    """Returns the frame skip."""
    del argument
    return options_lib.settings(AtariSettings, "atari", options).frame_skip


def _rom(game: str) -> str:
    """Returns the emulator's name of a game: `montezuma_revenge` of `MontezumaRevenge`."""
    if game in GAMES:
        return re.sub(r"(?<!^)(?=[A-Z])", "_", game).lower()
    try:
        from ale_py import roms
    except ImportError as error:
        raise _missing(game, error) from error
    for rom in roms.get_all_rom_ids():
        if rom.title().replace("_", "") == game:
            return rom
    raise errors.UnknownEnvironmentError(
        f"unknown Atari game {game!r}; possible are {', '.join(GAMES)}, and others of ale_py.roms"
    )


def _missing(game: str, error: ImportError) -> errors.EnvironmentLoadError:
    return errors.EnvironmentLoadError(
        f"environment 'atari:{game}' needs ale-py and OpenCV: install seedlib[atari] ({error})"
    )
