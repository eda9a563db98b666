"""The workloads of the suite, one package each.

``WORKLOADS`` maps the name on the command line to the class that implements
:class:`common.contract.workload.Workload`, as an import path so that listing the suite
imports none of them.
"""

WORKLOADS: dict[str, str] = {
    "bert": "benchmarks.bert.workload:BertPretraining",
    "cosmoflow": "benchmarks.cosmoflow.workload:CosmoFlowRegression",
    "deepcam": "benchmarks.deepcam.workload:DeepCamSegmentation",
    "dlrm": "benchmarks.dlrm.workload:Dlrm",
    "dlrm_dcnv2": "benchmarks.dlrm_dcnv2.workload:DlrmDcnv2",
    "flux1": "benchmarks.flux1.workload:FluxTraining",
    "gpt3": "benchmarks.gpt3.workload:GptPretraining",
    "llama2_70b_lora": "benchmarks.llama2_70b_lora.workload:LlamaLora",
    "llama31_8b": "benchmarks.llama31_8b.workload:LlamaPretraining",
    "maskrcnn": "benchmarks.maskrcnn.workload:MaskRCNNSegmentation",
    "minigo": "benchmarks.minigo.workload:MiniGoWorkload",
    "oc20": "benchmarks.oc20.workload:OpenCatalystForces",
    "openfold": "benchmarks.openfold.workload:OpenFold",
    "resnet": "benchmarks.resnet.workload:ResNet",
    "retinanet": "benchmarks.retinanet.workload:RetinaNetDetection",
    "rgat": "benchmarks.rgat.workload:RgatClassification",
    "rnnt": "benchmarks.rnnt.workload:SpeechRecognition",
    "stable_diffusion": "benchmarks.stable_diffusion.workload:StableDiffusion",
    "ssd300": "benchmarks.ssd300.workload:Ssd300Detection",
    "unet3d": "benchmarks.unet3d.workload:UNet3DSegmentation",
}
