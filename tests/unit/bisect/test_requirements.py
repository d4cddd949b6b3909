import pytest

from zerodrift.bisect.requirements import asked_for, caps

TOLD = [
    "numpy",
    'torch==2.6.0+cpu; platform_machine == "x86_64"',
    "torch==2.6.0; platform_system == 'Darwin'",
    "torchaudio",
    'torchvision==0.21.0; platform_machine == "ppc64le"',
    "intel_extension_for_pytorch==2.6.0; platform_machine == 'x86_64'",
    "datasets",
    'triton==3.2.0; platform_machine == "x86_64"',
    "mistral_common[audio,image]>=1.8.2",
    "fastapi[standard]>=0.115.0",
    'ray; extra == "ray"',
]


def test_what_goes_to_pip():
    assert asked_for(TOLD) == [
        "pip",
        "setuptools",
        "numpy",
        'torch==2.6.0; platform_machine == "x86_64"',
        "torch==2.6.0; platform_system == 'Darwin'",
        "intel_extension_for_pytorch==2.6.0; platform_machine == 'x86_64'",
        "mistral_common>=1.8.2",
        "fastapi[standard]>=0.115.0",
    ]


@pytest.mark.parametrize(
    ("release", "held"),
    [
        ("0.8.5", ["transformers<5", "transformers<4.54", "fastapi<0.116"]),
        ("0.9.2.post2", ["transformers<5", "transformers<4.54", "fastapi<0.116"]),
        ("0.10.0", ["transformers<5"]),
        ("0.18.1", ["transformers<5"]),
        ("0.19.0", []),
        ("0.32.0", []),
    ],
)
def test_what_an_old_release_is_held_to(release, held):
    assert caps(release) == held
