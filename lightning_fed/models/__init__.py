"""Ordinary LightningModules for the quickstart, the examples and the experiments of papers."""

from lightning_fed.models.classifier import Classifier, MLPClassifier
from lightning_fed.models.convnet import CifarCNN, ConvNet, EmnistCNN, MnistCNN, ResNet
from lightning_fed.models.recurrent import CharLSTM, SentimentLSTM
from lightning_fed.models.regression import LinearRegression, Quadratic

__all__ = [
    "CharLSTM",
    "CifarCNN",
    "Classifier",
    "ConvNet",
    "EmnistCNN",
    "LinearRegression",
    "MLPClassifier",
    "MnistCNN",
    "Quadratic",
    "ResNet",
    "SentimentLSTM",
]
