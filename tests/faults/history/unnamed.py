"""What the auditor lacks for the bugs that it catches and does not name, as found after they were run."""

UNNAMED = {
    "verl#6921": "prompts are tried with another end or another BOS, not with a token lost in the middle",
    "prime-rl#1334": "a history that lost a passage is none of the prompts that are tried",
    "vllm#22103": "alone and in a batch are compared on prompts of the audit's own, which share no beginning",
    "verl#5688": "an update is taken apart by layers and by projections, and all biases are neither",
    "verl#7139": "layers are tried in each other's place, two at a time, and not all moved on by one",
    "verl#7083": "an update is taken apart by whole tensors, and half of one that stayed old is none",
    "NeMo-RL#3540": "rounding is tried for all tensors of an update, not for some",
    "prime-rl#2714": "a tensor that holds neither its old nor its new values fits no account of an update",
    "vllm#44371": "rotary tables are the only buffers that are tried",
    "verl#7243": "two projections are tried exchanged as a whole, not row by row",
    "NeMo-RL#2631": "rotary frequencies of zero are tried, where cosines are one; tables of zeros are not",
    "Megatron-LM#6723": "accounts of an update are scored as a prefill, and here only decoding reads old weights",
    "Automodel#2147": "a leak is looked for with all of the sequence before, and this one lets its last tokens through",
}
