# SPDX-License-Identifier: Apache-2.0
"""The contract's last proof: speech of a Qwen3-TTS CustomVoice model, chunked against unchunked."""
