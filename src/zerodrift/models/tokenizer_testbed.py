"""A small byte-level BPE tokenizer, trained on the spot from the text below: the same ids on every machine.

Its alphabet is all 256 bytes, so decode(encode(text)) == text for any text that UTF-8 can write. The reverse
does not hold: most id sequences are not what the tokenizer would make of their text, which is how an engine that
sends text instead of ids changes the tokens that a trainer sees.
"""

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from zerodrift.models.testbed_config import CONTEXT_LENGTH, VOCAB_SIZE

BOS, EOS, IM_START, IM_END = "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (BOS, EOS, IM_START, IM_END)
"""In the order of their ids, 0 to 3."""

# ChatML. The newline after the assistant header is part of the prompt: an engine that strips it asks the model to
# produce a token which the trainer never scores.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT = """\
user: How far is the lighthouse from the harbour?
assistant: It is three miles along the coast, and the path is good when the tide is out.
user: What is 3+4? And what is 12+7?
assistant: 3+4=7 and 12+7=19.

The keeper of the lighthouse wrote down the weather every morning. She wrote the hour, the height of the water,
the direction of the wind, and the names of the ships that passed. When the lamp was lit she counted the seconds
between one flash and the next; there were always ten, and there had been ten for as long as anyone remembered.
One evening there were eleven. She thought that she had miscounted, so she counted again, and then again with the
clock in her hand. Eleven. Nothing had broken, nobody had complained, and the ships still came in. But the number
in the book was not the number on the wall, and so every position that a ship had taken from the light that night
was a little wrong.

In the morning she opened the housing and found that the new spring was stronger than the old one. The people who
had sent it had written "the same as before" on the box. It was almost the same. She put the old spring back,
counted ten, and wrote in the book what had happened, when it had begun, and how she knew.

def count_flashes(times):
    total = 0
    for before, after in zip(times, times[1:]):
        if after - before > 10.5:
            total += 1
    return total

The first rule of measuring is to measure the thing itself, and the second is to measure it twice. If the answers
are the same to the last digit, something is being copied; if they are far apart, something is broken; if they are
close, then the distance between them is what you know about the world. 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10.

user: Write a short list of things to take on a walk along the coast.
assistant: Take water, bread, a coat against the wind, and a map. Tell someone when you will be back. If the weather
changes, turn around; the sea does not wait for anyone, and the path along the rocks is under water for an hour
before and after the high tide.
user: Thank you. What is the best time to start?
assistant: Start in the morning, two hours after high water. Then the sand is firm, the light is behind you, and
there is time to rest at the harbour before the way back.

A good question has a number in it, or a name. "Is the water cold?" is a question about the person who asks; "How
cold is the water?" is a question about the sea. The keeper would not answer the first. For the second she had a
thermometer on a string, and a column in the book where she had written the answer every day for thirty years. In
the winter of the great storm the column was empty for four days. She did not fill it with what she thought the
water had been. She drew a line through it, and under the line she wrote: not measured.
"""


def build(model_name: str = "llama") -> Any:
    """The tokenizer of a built-in model, as `transformers` loads it back from a directory.

    Whatever tokenizer.json says, `transformers` 5 reads that of a qwen2 directory as a Qwen2Tokenizer: with Qwen's way
    of splitting words, which all built-ins therefore share, and with NFC, which only qwen2 has. Its text survives
    decode(encode(text)) where it is NFC already.
    """
    tokenizer = Tokenizer(BPE())
    if model_name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # One string, one thread: several would be counted in parallel, and `tokenizers` warns of any fork after that.
    tokenizer.train_from_iterator([TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        unk_token=EOS,  # never used, but without one Qwen2Tokenizer adds a token that the model does not have
        extra_special_tokens=[IM_START, IM_END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )
