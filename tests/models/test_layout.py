import subprocess
import sys

import pytest
import torch
from torch import nn

from exitflow.models.build import build_model
from exitflow.models.early_exit_resnet import Subsample
from exitflow.models.layout import best_layout
from exitflow.models.specs import EarlyExitResNet


def test_convolutions_run_with_channels_last_but_for_the_harmful_kind():
    assert best_layout(nn.Conv2d(3, 8, 3, stride=2)) == torch.channels_last
    assert best_layout(nn.Conv2d(16, 8, 1, stride=2)) == torch.channels_last
    assert best_layout(nn.Sequential(nn.Conv2d(15, 8, 1, stride=2))) == torch.contiguous_format


def test_the_residual_network_has_no_harmful_convolution():
    network = build_model(EarlyExitResNet(width=2).resolve(3), (1, 8, 8), 3, seed=0)
    assert best_layout(network) == torch.channels_last


def test_subsampling_before_a_1x1_convolution_is_a_stride():
    inputs, convolution = torch.randn(2, 4, 7, 9), nn.Conv2d(4, 6, 1, bias=False)
    strided = nn.functional.conv2d(inputs, convolution.weight, stride=2)
    torch.testing.assert_close(convolution(Subsample(2)(inputs)), strided)


@pytest.mark.heavy
def test_training_narrow_networks_corrupts_no_memory():
    """In a process of its own, because the harm would be a crash at any later moment."""
    program = """
import torch
from exitflow.models.build import build_model
from exitflow.models.specs import EarlyExitResNet
torch.set_num_threads(1)
for width in (1, 2, 3, 4, 6):
    network = build_model(EarlyExitResNet(width=width).resolve(3), (3, 16, 16), 3, seed=0).submodel(3)
    network = network.to(memory_format=torch.channels_last)
    for _ in range(20):
        network(torch.randn(8, 3, 16, 16).contiguous(memory_format=torch.channels_last))[0].sum().backward()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
