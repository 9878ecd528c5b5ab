"""Sound latents to samples: the decoder half of diffusers' audio tokenizer."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from .config import SnapshotConfig, SnapshotError
from .loader import check_keys, load_weights, read_header
from .sampling import NonFiniteError


def audio_tokenizer(config: dict[str, Any]) -> Any:
    """Diffusers' module for a `sound_tokenizer/config.json`, with weights as it draws them.

    Raises:
        NotImplementedError: a kind that diffusers has no code for.
    """
    # Imported here: diffusers costs seconds, and only the process that makes sound needs it.
    from diffusers.models.autoencoders.autoencoder_cosmos3_audio import Cosmos3AVAEAudioTokenizer

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*weight_norm.*")
        return Cosmos3AVAEAudioTokenizer.from_config(config)


class SoundDecoder:
    """`Cosmos3AVAEAudioTokenizer` without its encoder."""

    def __init__(self, snapshot: SnapshotConfig, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Load the decoder of `sound_tokenizer/`, strictly.

        Raises:
            SnapshotError: there is none, it is of a kind that diffusers has no code for, or a key is wrong.
        """
        folder = snapshot.root / "sound_tokenizer"
        if snapshot.sound is None:
            raise SnapshotError(f"{folder}: the snapshot has no sound tokenizer")
        try:
            with torch.device("meta"):
                self._tokenizer = audio_tokenizer(snapshot.sound | {"encoder_enabled": False})
        except NotImplementedError as error:
            raise SnapshotError(f"{folder / 'config.json'}: {error}") from None
        header = {key: value for key, value in read_header(folder).items() if not key.startswith("encoder.")}
        check_keys(header, {key: tuple(value.shape) for key, value in self._tokenizer.state_dict().items()}, folder)
        load_weights(self._tokenizer, header, device=device, dtype=dtype)
        self.device, self.dtype = device, dtype

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents `[C, T]` to samples `[channels, T * hop_size]` in [-1, 1], float32 on the CPU.

        Raises:
            NonFiniteError: the decoder gave NaN or infinity.
        """
        sound: torch.Tensor = self._tokenizer.decode(latents.to(self.device, self.dtype)).float().cpu()
        if not sound.isfinite().all():
            raise NonFiniteError(f"the sound decoder's samples are not finite in {self.dtype}")
        return sound
